"""Writes cases.jsonl, the labelled set for detectors: `python tests/placement/detect/make_cases.py`.

Synthetic: sentences in English, Chinese and German with made-up values whose checksums are computed here, by other
code than the detectors', and hard negatives that look alike (wrong check digits, order numbers, ISBNs, hashes,
dates, versions, prose about passwords). Seeded, so the file can be made again to the byte.
"""

from __future__ import annotations

import json
import random
import string
import uuid
from collections.abc import Callable
from pathlib import Path

RNG = random.Random(20261201)
Value = Callable[[], str]


def digits(n: int) -> str:
    return "".join(RNG.choice(string.digits) for _ in range(n))


def word(n: int, alphabet: str = string.ascii_letters + string.digits) -> str:
    return "".join(RNG.choice(alphabet) for _ in range(n))


def luhn_digit(body: str) -> str:
    total = sum(sum(divmod(int(c) * (2 if i % 2 == 0 else 1), 10)) for i, c in enumerate(reversed(body)))
    return str(-total % 10)


def card(*, valid: bool = True) -> str:
    prefix, length = RNG.choice([("4", 16), ("51", 16), ("55", 16), ("2221", 16), ("37", 15), ("6011", 16), ("62", 16)])
    body = prefix + digits(length - len(prefix) - 1)
    check = int(luhn_digit(body))
    number = body + str(check if valid else (check + RNG.randint(1, 9)) % 10)
    separator = RNG.choice(["", " ", "-"])
    parts = [number[:4], number[4:10], number[10:]] if length == 15 else [number[i : i + 4] for i in range(0, 16, 4)]
    return separator.join(parts)


def iban(*, valid: bool = True) -> str:
    country, length = RNG.choice([("DE", 22), ("FR", 27), ("GB", 22), ("AT", 20), ("CH", 21), ("NL", 18)])
    if country == "GB":
        body = "NWBK" + digits(14)
    elif country == "NL":
        body = "ABNA" + digits(10)
    else:
        body = digits(length - 4)
    if country == "FR":  # the national key has to agree too
        bank, branch, account = body[:5], body[5:10], body[10:21]
        key = 97 - (89 * int(bank) + 15 * int(branch) + 3 * int(account)) % 97
        body = f"{bank}{branch}{account}{key:02d}"
    number = "".join(str(int(c, 36)) for c in body + country + "00")
    check = 98 - int(number) % 97
    if not valid:
        check = check % 97 + 2 if check % 97 + 2 != check else check - 1
    text = f"{country}{check:02d}{body}"
    return " ".join(text[i : i + 4] for i in range(0, len(text), 4)) if RNG.random() < 0.5 else text


def cn_id(*, valid: bool = True) -> str:
    body = RNG.choice(["110101", "310101", "440106", "510104", "330106"])
    body += f"{RNG.randint(1950, 2005)}{RNG.randint(1, 12):02d}{RNG.randint(1, 28):02d}{digits(3)}"
    check = "10X98765432"[sum(int(c) * pow(2, 17 - i) for i, c in enumerate(body)) % 11]
    return body + (check if valid else RNG.choice([c for c in string.digits if c != check]))


def de_tax_id(*, valid: bool = True) -> str:
    while True:
        body = RNG.choice("123456789") + digits(9)
        counts = sorted(body.count(c) for c in set(body))
        if counts == [1] * 8 + [2]:
            break
    product = 10
    for c in body:
        total = (int(c) + product) % 10 or 10
        product = total * 2 % 11
    check = (11 - product) % 10
    number = body + str(check if valid else (check + RNG.randint(1, 9)) % 10)
    return number if RNG.random() < 0.5 else f"{number[:2]} {number[2:5]} {number[5:8]} {number[8:]}"


def de_card(*, valid: bool = True) -> str:
    body = RNG.choice("CFGHJKLMNPRTVWXYZ") + word(8, "0123456789CFGHJKLMNPRTVWXYZ")
    check = sum(int(c, 36) * (7, 3, 1)[i % 3] for i, c in enumerate(body)) % 10
    return body + str(check if valid else (check + RNG.randint(1, 9)) % 10)


def us_ssn() -> str:
    return f"{RNG.randint(101, 649)}-{RNG.randint(10, 99)}-{RNG.randint(1000, 9999)}"


def nhs(*, valid: bool = True) -> str:
    while True:
        body = RNG.choice("4679") + digits(8)
        check = 11 - sum(int(c) * (10 - i) for i, c in enumerate(body)) % 11
        if check != 10:
            break
    number = body + str((check % 11 if valid else check % 11 + 1) % 10)
    return f"{number[:3]} {number[3:6]} {number[6:]}"


def fr_nir() -> str:
    body = (
        f"{RNG.choice('12')}{digits(1)}{RNG.randint(0, 9)}{RNG.randint(1, 12):02d}75{RNG.randint(100, 900)}{digits(3)}"
    )
    return f"{body}{97 - int(body) % 97:02d}"


def email() -> str:
    first, last = RNG.choice(["anna", "li.wei", "max", "j.doe", "sofia"]), RNG.choice(["berg", "chen", "smith", "k"])
    host = RNG.choice(["gmail.com", "web.de", "qq.com", "company.co.uk", "mail.uni-bonn.de", "163.com"])
    return f"{first}{RNG.choice(['.', '_', ''])}{last}{RNG.choice(['', '88'])}@{host}"


def phone_us() -> str:
    area = RNG.choice(["212", "415", "312", "206", "617"])
    exchange = f"{RNG.randint(2, 9)}{digits(2)}".replace("11", "22")
    line = digits(4)
    return RNG.choice([f"({area}) {exchange}-{line}", f"{area}-{exchange}-{line}", f"+1 {area} {exchange} {line}"])


def phone_de() -> str:
    return RNG.choice(
        [f"0151 2{digits(7)}", f"+49 30 {RNG.randint(2, 9)}{digits(6)}", f"030/{RNG.randint(2, 9)}{digits(6)}"]
    )


def phone_cn() -> str:
    body = RNG.choice(["138", "139", "150", "186", "177"]) + digits(8)
    return RNG.choice([body, f"+86 {body}", f"{body[:3]} {body[3:7]} {body[7:]}"])


def token() -> str:
    return RNG.choice(
        [
            lambda: "ghp_" + word(36),
            lambda: "AKIA" + word(16, string.ascii_uppercase + "234567"),
            lambda: "sk_live_" + word(24),
            lambda: "glpat-" + word(20),
            lambda: "hf_" + word(34),
            lambda: "AIza" + word(35),
            lambda: "github_pat_" + word(22) + "_" + word(59),
            lambda: "xoxb-" + digits(12) + "-" + digits(12) + "-" + word(24),
        ]
    )()


def password() -> str:
    return RNG.choice(["Sommer", "river", "tiger", "Qwert", "moon"]) + digits(3) + RNG.choice(["!", "#", "x", "$"])


SENTENCES: dict[str, list[tuple[str, str, Value]]] = {
    "en": [
        ("payment_card", "Please charge {} for the two tickets.", card),
        ("payment_card", "My Visa number is {}, it expires in May.", card),
        ("payment_card", "{} was declined at the till, can you check?", card),
        ("iban", "Wire the deposit to {} by Friday.", iban),
        ("iban", "Our account (IBAN {}) changed last month.", iban),
        ("us_ssn", "Her SSN is {} and she was born in Ohio.", us_ssn),
        ("us_ssn", "Employee record: {} - benefits start Monday.", us_ssn),
        ("uk_nhs", "Patient with NHS number {} was discharged.", nhs),
        ("email", "Forward the minutes to {} please.", email),
        ("email", "{} has not answered since Tuesday.", email),
        ("phone", "Call me back at {} after six.", phone_us),
        ("phone", "Phone: {}", phone_us),
        ("api_key", "The deploy failed, here is the key: {}", token),
        ("api_key", "export TOKEN={}", token),
        ("password", "The password is {} until Monday.", password),
        ("password", "login: admin\npassword: {}", password),
        ("cn_resident_id", "The guest from Chengdu, resident ID {}, checked in.", cn_id),
        ("fr_nir", "Le numéro de sécurité sociale (NIR) is {} in the French file.", fr_nir),
    ],
    "zh": [
        ("payment_card", "请从我的信用卡{}扣款。", card),
        ("payment_card", "卡号 {} ,有效期到明年五月。", card),
        ("iban", "请把定金汇到 {} 这个账户。", iban),
        ("cn_resident_id", "我的身份证号是{},请帮我登记。", cn_id),
        ("cn_resident_id", "住客:王芳,{},两晚。", cn_id),
        ("email", "会议纪要请发到 {} 。", email),
        ("email", "联系邮箱:{}", email),
        ("phone", "我的手机号是{},晚上联系。", phone_cn),
        ("phone", "请拨打 {} 找李经理。", phone_cn),
        ("phone", "收货人电话:{}", phone_cn),
        ("api_key", "部署失败了,密钥是 {} ,帮我看看。", token),
        ("password", "服务器密码是{} ,不要外传。", password),
        ("password", "账号 admin,口令:{}", password),
    ],
    "de": [
        ("payment_card", "Bitte belasten Sie die Karte {} mit 80 Euro.", card),
        ("payment_card", "Meine Kreditkarte ({}) wurde gesperrt.", card),
        ("iban", "Überweisen Sie die Kaution auf {} bis Freitag.", iban),
        ("iban", "IBAN: {}", iban),
        ("de_tax_id", "Meine Steuer-ID lautet {}.", de_tax_id),
        ("de_tax_id", "Steueridentifikationsnummer {} liegt dem Amt vor.", de_tax_id),
        ("de_id_card", "Ausweisnummer {}, ausgestellt in Bonn.", de_card),
        ("email", "Schicken Sie das Protokoll an {} bitte.", email),
        ("email", "Unter {} bin ich erreichbar.", email),
        ("phone", "Rufen Sie mich unter Tel. {} zurück.", phone_de),
        ("phone", "Handy: {}", phone_de),
        ("api_key", "Der Schlüssel {} ist leider ins Repository geraten.", token),
        ("password", "Das Passwort lautet {} bis Montag.", password),
        ("password", "Kennwort: {}", password),
    ],
}  # fmt: skip

LOOK_ALIKES: dict[str, list[tuple[str, Value]]] = {
    "en": [
        ("Order {} was shipped this morning.", lambda: card(valid=False)),
        ("The tracking number is 1Z{}.", lambda: word(16, string.ascii_uppercase + string.digits)),
        ("Transfer reference {} could not be found.", lambda: iban(valid=False)),
        ("ISBN 978-{} is out of print.", lambda: f"{digits(1)}-{digits(3)}-{digits(5)}-{digits(1)}"),
        ("Commit {} broke the build.", lambda: word(40, "0123456789abcdef")),
        ("Request id {} timed out.", lambda: str(uuid.UUID(int=RNG.getrandbits(128)))),
        ("Upgrade to version {} before Friday.", lambda: f"{RNG.randint(1, 20)}.{RNG.randint(0, 40)}.{digits(3)}"),
        ("The match ended {} after extra time.", lambda: f"{RNG.randint(0, 9)}-{RNG.randint(0, 9)}"),
        ("The file is {} bytes long.", lambda: f"{RNG.randint(1, 999)},{digits(3)},{digits(3)}"),
        ("The event was logged at {}.", lambda: f"17{digits(8)}"),
        ("Part number {} fits the 2019 model.", lambda: f"{digits(3)}-{digits(4)}-{digits(2)}"),
        ("Your password is {} and must be changed.", lambda: RNG.choice(["expired", "wrong", "required", "too short"])),
        ("Write to support@{} for documentation.", lambda: RNG.choice(["example.com", "example.org", "sub.example.net"])),
        ("Pi begins with 3.{}.", lambda: "1415926535897932384626433832"[: RNG.randint(15, 28)]),
        ("The coordinates are {}.", lambda: f"{RNG.randint(10, 80)}.{digits(6)}, {RNG.randint(10, 99)}.{digits(6)}"),
        ("Between {} the population doubled.", lambda: f"{RNG.randint(1500, 1700)} and {RNG.randint(1701, 1999)}"),
        ("Set the timeout to {} milliseconds.", lambda: digits(5)),
        ("The NHS number {} does not check out.", lambda: nhs(valid=False)),
    ],
    "zh": [
        ("订单号 {} 已于今天早上发货。", lambda: card(valid=False)),
        ("身份证号 {} 校验失败,请重新输入。", lambda: cn_id(valid=False)),
        ("请求编号 {} 超时了。", lambda: str(uuid.UUID(int=RNG.getrandbits(128)))),
        ("请升级到 {} 版本。", lambda: f"{RNG.randint(1, 20)}.{RNG.randint(0, 40)}.{digits(2)}"),
        ("全市共有{}人参加了比赛。", lambda: f"{RNG.randint(2, 9)}{digits(5)}"),
        ("这本书一共{}页,共售出{}册。", lambda: digits(3)),
        ("密码是{}。", lambda: RNG.choice(["错误的", "必填项", "加密存储的"])),
        ("日志时间是{}。", lambda: f"2026-{RNG.randint(1, 12):02d}-{RNG.randint(10, 28)} 1{digits(1)}:3{digits(1)}:5{digits(1)}"),
        ("圆周率约等于3.{}。", lambda: "14159265358979323846"[: RNG.randint(12, 20)]),
        ("发票号码 {} 已作废。", lambda: "0" + digits(7)),
        ("提交 {} 之后测试失败了。", lambda: word(40, "0123456789abcdef")),
    ],
    "de": [
        ("Die Bestellung {} wurde heute verschickt.", lambda: card(valid=False)),
        ("Der Verwendungszweck {} ist unbekannt.", lambda: iban(valid=False)),
        ("Steuer-ID {} ist ungültig.", lambda: de_tax_id(valid=False)),
        ("Die Ausweisnummer {} besteht die Prüfung nicht.", lambda: de_card(valid=False)),
        ("Aktenzeichen {} liegt beim Amtsgericht.", lambda: f"{digits(2)} C {digits(3)}/{digits(2)}"),
        ("Die Anfrage {} lief in eine Zeitüberschreitung.", lambda: str(uuid.UUID(int=RNG.getrandbits(128)))),
        ("Im Jahr {} wurde die Brücke gebaut.", lambda: f"{RNG.randint(1500, 1990)}"),
        ("Das Passwort ist {}.", lambda: RNG.choice(["falsch", "abgelaufen", "nicht gesetzt"])),
        ("Die Rechnung {} ist bezahlt.", lambda: f"RE-{digits(4)}-{digits(5)}"),
        ("Der Zug fährt um {} ab.", lambda: f"{RNG.randint(10, 23)}:{RNG.randint(10, 59)} Uhr"),
        ("Es kostet {} Euro.", lambda: f"{RNG.randint(1, 9)}.{digits(3)},{digits(2)}"),
        ("Schreiben Sie an info@{} für ein Muster.", lambda: RNG.choice(["example.com", "example.org"])),
        ("Der Commit {} ist fehlerhaft.", lambda: word(40, "0123456789abcdef")),
    ],
}  # fmt: skip

PROSE = {
    "en": "The committee met twice before the summer and agreed that the harbour needed a new crane. ",
    "zh": "委员会在夏天之前开了两次会,一致认为港口需要一台新的起重机。",
    "de": "Der Ausschuss tagte zweimal vor dem Sommer und war sich einig, dass der Hafen einen neuen Kran braucht. ",
}
EACH = {"positive": 8, "negative": 7}


def cases() -> list[dict[str, object]]:
    made: list[dict[str, object]] = []
    for lang, sentences in SENTENCES.items():
        for kind, sentence, value in sentences:
            for i in range(EACH["positive"]):
                filled = value()
                lead = PROSE[lang] * RNG.choice([0, 0, 1, 3])
                start = len(lead) + sentence.index("{}")
                text = lead + sentence.replace("{}", filled) + ("\n" + PROSE[lang] if i % 3 == 0 else "")
                made.append({"lang": lang, "text": text, "spans": [[start, start + len(filled), kind]]})
    for lang, look_alikes in LOOK_ALIKES.items():
        for sentence, value in look_alikes:
            for _ in range(EACH["negative"]):
                text = PROSE[lang] * RNG.choice([0, 1]) + sentence
                while "{}" in text:
                    text = text.replace("{}", value(), 1)
                made.append({"lang": lang, "text": text, "spans": []})
    return [{"id": f"{case['lang']}-{i:04d}", **case} for i, case in enumerate(made)]


if __name__ == "__main__":
    path = Path(__file__).with_name("cases.jsonl")
    path.write_text("".join(json.dumps(case, ensure_ascii=False) + "\n" for case in cases()))
