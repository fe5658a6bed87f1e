"""The policy document as an admin writes it: field names, types and what each means. Cross-checks are in model.py.

Unknown keys are errors everywhere. `json_schema()` is for editors.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$")]
ModelName = Annotated[str, Field(min_length=1, max_length=200)]
Seconds = Annotated[float, Field(gt=0.0, le=86_400.0, allow_inf_nan=False)]
Price = Annotated[float, Field(ge=0.0, le=1e6, allow_inf_nan=False)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Labels(_Part):
    """Privacy labels, and which is above which. Give `order` or `raises`, not both."""

    order: list[Name] | None = Field(default=None, min_length=1, description="A chain, the least private label first.")
    raises: dict[Name, list[Name]] | None = Field(
        default=None,
        min_length=1,
        description="For each label the labels right above it; any two must have one least join.",
    )
    default: Name | None = Field(default=None, description="Label of a request that claims none.")


class PlaceRule(_Part):
    """Where data may be: every key that is given must match. `anywhere: true` stands alone."""

    anywhere: Literal[True] | None = Field(default=None, description="No limit at all.")
    tiers: list[Literal["core", "edge"]] | None = Field(default=None, min_length=1)
    regions: list[Name] | None = Field(default=None, min_length=1)
    jurisdictions: list[Name] | None = Field(default=None, min_length=1)
    sites: list[Name] | None = Field(
        default=None, min_length=1, description="`own` is the site of the request's entry."
    )
    nodes: list[Name] | None = Field(default=None, min_length=1)


def _one_or_more(value: Any) -> str:
    return "alternatives" if isinstance(value, list) else "rule"


PlaceRules = Annotated[
    Annotated[PlaceRule, Tag("rule")]
    | Annotated[list[PlaceRule], Field(min_length=1, max_length=64), Tag("alternatives")],
    Discriminator(_one_or_more),
]


def _integer(value: Any) -> Any:
    if type(value) is not int:  # True and 1.0 equal 1
        raise ValueError("must be an integer")
    return value


class Models(_Part):
    """Which models the tenant may use."""

    allowed: list[ModelName] | None = Field(default=None, min_length=1, description="Absent: every model of the mesh.")
    default: ModelName | None = Field(default=None, description="Model of a request that names none.")
    downgrade: dict[ModelName, Annotated[list[ModelName], Field(min_length=1, max_length=8)]] = Field(
        default={},
        max_length=64,
        description="For a model those that may answer in its place, in order, where no node can run it now.",
    )


class PatternRule(_Part):
    """A tenant's own kind of private text, such as project names or file numbers."""

    regex: str = Field(min_length=1, max_length=500, description="RE2 syntax; linear in the text, whatever it says.")
    raise_to: Name = Field(description="Label that a match raises to.")


class DetectorRules(_Part):
    """What is looked for in prompts, at the entry, before anything leaves it; findings only ever raise the label."""

    raise_to: dict[str, Name] = Field(
        default={},
        max_length=200,
        description="For a kind (`iban`), or all kinds of a detector (`identifiers`), the label that it raises to.",
    )
    patterns: dict[Name, PatternRule] = Field(default={}, max_length=64, description="Kinds of the tenant's own.")
    on_failure: Name | None = Field(
        default=None, description="Label of a prompt that detectors could not look at; absent: the top label."
    )


class PriceTable(_Part):
    """Seconds of cost for each second of use; placement minimises time plus price."""

    core_prefill_per_s: Price = 0.0
    core_decode_per_s: Price = 0.0
    edge_prefill_per_s: Price = 0.0
    edge_decode_per_s: Price = 0.0


class LimitRules(_Part):
    """What the tenant may ask for. Each entry counts for itself; 10 seconds of a rate may come at once."""

    requests_per_minute: Annotated[float, Field(gt=0.0, le=1e9, allow_inf_nan=False)] | None = None
    tokens_per_minute: Annotated[float, Field(gt=0.0, le=1e12, allow_inf_nan=False)] | None = Field(
        default=None, description="Tokens of prompts, and those that are generated."
    )
    offline_share_ratio: float = Field(
        default=0.2, ge=0.0, le=1.0, allow_inf_nan=False, description="Share of both at a site that is cut off."
    )


class TargetRules(_Part):
    """Latency that requests want which state none, in seconds. A request may ask for an earlier deadline only."""

    ttft_s: Seconds | None = Field(default=None, description="Time to first token.")
    tpot_s: Seconds | None = Field(default=None, description="Time per output token.")
    deadline_s: Seconds | None = Field(default=None, description="A request that takes longer is ended.")
    ttft_deadline_s: Seconds | None = Field(
        default=None, description="A request whose first token would come later wherever it may run is refused at once."
    )


class ConditionRule(_Part):
    """A rule in CEL. Exactly one of `raise_to` and `deny`. One that cannot be worked out refuses the request."""

    when: str = Field(
        min_length=1,
        max_length=1000,
        description="CEL over tenant, key_id, model, label, claimed_label, prompt_tokens, max_tokens, kind, findings, "
        "attributes and entry.{node, site, region, jurisdiction, tier}; must be true or false.",
    )
    raise_to: Name | None = Field(default=None, description="Label that the request is raised to.")
    deny: str | None = Field(default=None, min_length=1, max_length=200, description="Refused, and told this.")


class PolicyDocument(_Part):
    """One tenant's placement policy."""

    version: Annotated[Literal[1], BeforeValidator(_integer)] = Field(description="Version of this format.")
    labels: Labels = Labels()
    rules: dict[Name, PlaceRules] = Field(
        default={}, description="Where a prompt of each label may be; a missing label stays at the entry's own site."
    )
    kv_rules: dict[Name, PlaceRules] = Field(
        default={}, description="Where KV of each label may be; a missing label: as its prompt."
    )
    models: Models = Models()
    detectors: DetectorRules = DetectorRules()
    conditions: list[ConditionRule] = Field(
        default=[], max_length=32, description="All are worked out for each request, in this order."
    )
    priority: int = Field(default=0, ge=-100, le=100, description="Smaller runs first.")
    share: float = Field(
        default=1.0,
        ge=0.01,
        le=100.0,
        allow_inf_nan=False,
        description="Weight of the tenant among those of the same priority, where requests have to wait.",
    )
    limits: LimitRules = LimitRules()
    targets: TargetRules = TargetRules()
    expires: str | None = Field(
        default=None,
        max_length=40,
        description='Day or time (RFC 3339, quoted) from which on every request is refused, such as "2027-01-31".',
    )
    fallback: Literal["allowed", "none"] = Field(
        default="allowed", description="`none`: if the first choice fails, the request fails."
    )
    relay: Literal["allowed", "forbidden"] = Field(
        default="allowed",
        description="Whether data between two sites may pass a third node, sealed end to end.",
    )
    price: PriceTable = PriceTable()
    offline_max_s: float | None = Field(
        default=None,
        ge=0.0,
        allow_inf_nan=False,
        description="How long a site that is cut off may go on under this policy, in seconds since it last heard from "
        "the mesh; then it refuses what is new. Absent: for as long as it is cut off.",
    )
    kv_max_loss_ratio: float = Field(
        default=0.01,
        ge=0.0,
        le=1.0,
        allow_inf_nan=False,
        description="How much a codec of moving KV may raise the continuation's perplexity, as measured on the model; "
        "0.01 is 1 %, 0 allows only what loses nothing.",
    )


def json_schema() -> dict[str, Any]:
    """JSON Schema of the document."""
    return PolicyDocument.model_json_schema()
