"""Chat messages to a prompt, by the model's own template, so that no message can make a control token.

Neither the template nor a message is trusted. The template runs in mesh.model.template_sandbox. A *guard*, a
noncharacter that no message holds, is put into every control text of a message; Tokenizer.encode_prompt drops it after
the control tokens were parsed. Content without such text is rendered exactly as everybody else does.

A template may take content apart and put it together so that a control text appears that was not there, or a message
may hold a part that the text beside it completes. So the chat is rendered a second time with guards around every
character of content, where no control token can come from a message whatever is cut out or put together, and the
control tokens of both must be the same; if not, the second rendering is the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from mesh.errors import InvalidRequest
from mesh.model.template_sandbox import SandboxedTemplate, TemplateRefusal
from mesh.model.tokenizer import Tokenizer

MAX_MESSAGES: Final = 4096
ROLES: Final = ("system", "user", "assistant")
_GUARDS: Final = tuple(chr(c) for c in range(0xFDD0, 0xFDF0))  # noncharacters: they mean nothing in any text


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One chat message; `role` is one of ROLES."""

    role: str
    content: str

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise InvalidRequest(f"a message's role must be one of {', '.join(ROLES)}", field="messages")


@dataclass(frozen=True, slots=True)
class Rendered:
    """A rendered chat; `guard` marks places where a message's text must not become a control token."""

    text: str
    guard: str


class ChatTemplate:
    """A compiled template for one tokenizer. Safe to share between threads."""

    def __init__(self, source: str, tokenizer: Tokenizer) -> None:
        """Raises InvalidRequest if the template does not compile."""
        self._template = SandboxedTemplate(source)
        self._tokenizer = tokenizer

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Ids of the prompt that asks the assistant for the next message. Raises InvalidRequest as `render`."""
        rendered = self.render(messages)
        return self._tokenizer.encode_prompt(rendered.text, rendered.guard)

    def render(self, messages: Sequence[Message]) -> Rendered:
        """Raises InvalidRequest: no or too many messages, or the template refuses them, fails, runs too long or makes
        too much text."""
        if not 1 <= len(messages) <= MAX_MESSAGES:
            raise InvalidRequest(f"a chat has 1 to {MAX_MESSAGES} messages, not {len(messages)}", field="messages")
        used = set().union(*(m.content for m in messages))
        guard = next((c for c in _GUARDS if c not in used), None)
        if guard is None:
            raise InvalidRequest("the messages hold all Unicode noncharacters, which no text does", field="messages")
        text = self._run([(m.role, self._tokenizer.break_controls(m.content, guard)) for m in messages])
        safe = self._run([(m.role, guard + guard.join(m.content) + guard if m.content else "") for m in messages])
        same = self._tokenizer.control_ids_in(text) == self._tokenizer.control_ids_in(safe)
        return Rendered(text if same else safe, guard)

    def _run(self, turns: Sequence[tuple[str, str]]) -> str:
        vocabulary = self._tokenizer.vocabulary
        try:
            return self._template.render(
                {
                    "messages": [{"role": role, "content": content} for role, content in turns],
                    "add_generation_prompt": True,
                    "bos_token": self._tokenizer.text_of(vocabulary.bos_token_id),
                    "eos_token": self._tokenizer.text_of(min(vocabulary.eos_token_ids)),
                    "tools": None,
                    "documents": None,
                }
            )
        except TemplateRefusal as exc:
            raise InvalidRequest("the model's chat template refuses these messages", field="messages") from exc
