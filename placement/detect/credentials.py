"""Secrets in text: keys and tokens by their issuers' formats (detect-secrets' rules, never its network checks), a few
formats that it lacks, and passwords that are announced as such. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

from detect_secrets.plugins.aws import AWSKeyDetector
from detect_secrets.plugins.azure_storage_key import AzureStorageKeyDetector
from detect_secrets.plugins.base import RegexBasedDetector
from detect_secrets.plugins.basic_auth import BasicAuthDetector
from detect_secrets.plugins.discord import DiscordBotTokenDetector
from detect_secrets.plugins.github_token import GitHubTokenDetector
from detect_secrets.plugins.gitlab_token import GitLabTokenDetector
from detect_secrets.plugins.jwt import JwtTokenDetector
from detect_secrets.plugins.mailchimp import MailchimpDetector
from detect_secrets.plugins.npm import NpmDetector
from detect_secrets.plugins.openai import OpenAIDetector
from detect_secrets.plugins.private_key import PrivateKeyDetector
from detect_secrets.plugins.pypi_token import PypiTokenDetector
from detect_secrets.plugins.sendgrid import SendGridDetector
from detect_secrets.plugins.slack import SlackDetector
from detect_secrets.plugins.square_oauth import SquareOAuthDetector
from detect_secrets.plugins.stripe import StripeDetector
from detect_secrets.plugins.telegram_token import TelegramBotTokenDetector
from detect_secrets.plugins.twilio import TwilioKeyDetector

from placement.detect.types import Finding

_PLUGINS = (
    *(AWSKeyDetector(), AzureStorageKeyDetector(), BasicAuthDetector()),
    *(DiscordBotTokenDetector(), GitHubTokenDetector(), GitLabTokenDetector(), JwtTokenDetector()),
    *(MailchimpDetector(), NpmDetector(), OpenAIDetector(), PypiTokenDetector(), SendGridDetector()),
    *(SlackDetector(), SquareOAuthDetector(), StripeDetector(), TelegramBotTokenDetector(), TwilioKeyDetector()),
)
_FORMATS = re.compile(
    r"(?<![\w-])(?:github_pat_\w{36,255}|AIza[\w-]{35}|sk-(?:ant|proj)-[\w-]{20,200}|hf_[A-Za-z0-9]{30,60}"
    r"|xox[abeprs]-[\w-]{10,200}|glpat-[\w-]{20,64}|ya29\.[\w-]{20,250}|shpat_[a-fA-F0-9]{32})(?![\w-])"
)
_PASSWORD = re.compile(
    r"(?:\b(?:password|passwd|passphrase|pwd|passwort|kennwort|passcode|pin(?:-code)?|geheimzahl)\b|密码|口令)"
    r"(?:\s{0,3}(?:is|ist|lautet|to|=|:|：|是|为|auf)\s{0,3}){1,2}"
    r"(?P<quote>[\"'“„「]?)(?P<value>[^\s\"'”“」，。,;]{4,128})",
    re.IGNORECASE,
)
_NOT_A_PASSWORD = re.compile(
    r"\*+|x+|\.+|<.*>|\{.*\}|\$\{?\w+\}?|%\w+%|null|none|true|false|required|incorrect|wrong|expired|reset|changed|"
    r"optional|correct|invalid|falsch|abgelaufen|needed|stored|hashed|encrypted|always|never|the|your|not|nicht|at",
    re.IGNORECASE,
)
_PRIVATE_KEY = PrivateKeyDetector()


class Credentials:
    """The detector "credentials"."""

    name = "credentials"
    kinds = frozenset({"api_key", "private_key", "password"})

    def find(self, text: str) -> Iterable[Finding]:
        for plugin in _PLUGINS:
            yield from _matches(plugin, text, "api_key")
        yield from _matches(_PRIVATE_KEY, text, "private_key")
        for match in _FORMATS.finditer(text):
            yield Finding(match.start(), match.end(), "api_key")
        for match in _PASSWORD.finditer(text):
            value = match["value"].rstrip(".!?:)")
            if len(value) >= 4 and not _NOT_A_PASSWORD.fullmatch(value) and _looks_chosen(value, match["quote"]):
                yield Finding(match.start("value"), match.start("value") + len(value), "password")


def _looks_chosen(value: str, quote: str) -> bool:
    """A plain word after "the password is" is prose unless it is quoted; digits or signs in it make a password."""
    return bool(quote) or not value.isalpha()


def _matches(plugin: RegexBasedDetector, text: str, kind: str) -> Iterable[Finding]:
    for pattern in plugin.denylist:
        for match in pattern.finditer(text):
            if not isinstance(plugin, JwtTokenDetector) or plugin.is_formally_valid(match.group()):
                yield Finding(match.start(), match.end(), kind)
