"""Places as columns, so that a rule is checked for all nodes at once.

One object lives as long as the set of places does, and keeps what was worked out over them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from functools import cached_property
from hashlib import blake2b
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from mesh.identity.place import Place

_KEPT = 256  # verdicts; each is a byte or two a place, so 7 MB for 13,200 places
Kept = TypeVar("Kept", bound=np.generic)


class PlaceColumns:
    """String arrays over places, shape [n_places]; a column is made when a rule first asks for it."""

    def __init__(self, places: tuple[Place, ...]) -> None:
        self.places = places
        self._kept: OrderedDict[Hashable, tuple[object, NDArray[Any]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self.places)

    def kept(self, owner: object, key: Hashable, make: Callable[[], NDArray[Kept]]) -> NDArray[Kept]:
        """What `make` gave for this owner and key, made once while it is in use; nobody may write to it. A tuple of
        owners is known by what is in it."""
        full_key = (tuple(map(id, owner)) if isinstance(owner, tuple) else id(owner), key)
        known = self._kept.get(full_key)
        if known is None:
            # The owner is kept too, so that its id cannot be another's.
            known = self._kept[full_key] = owner, make()
            known[1].flags.writeable = False
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        else:
            self._kept.move_to_end(full_key)
        return known[1]

    @cached_property
    def row(self) -> Mapping[str, int]:
        """Row by node id."""
        return {place.node_id: i for i, place in enumerate(self.places)}

    @cached_property
    def by_id(self) -> NDArray[np.int64]:
        """Rows in the order of node ids."""
        return np.argsort(self.node_id, kind="stable")

    @cached_property
    def is_by_id(self) -> bool:
        """Whether the rows are in the order of node ids."""
        return bool((self.by_id == np.arange(len(self.places))).all())

    @cached_property
    def tie_keys(self) -> NDArray[np.uint64]:
        """A number for each node id, as if drawn: the same in every process, whatever the order of rows."""
        digests = b"".join(blake2b(place.node_id.encode(), digest_size=8).digest() for place in self.places)
        return np.frombuffer(digests, dtype="<u8").astype(np.uint64)

    @cached_property
    def tier(self) -> NDArray[np.str_]:
        return np.array([place.tier.value for place in self.places], dtype=np.str_)

    @cached_property
    def region(self) -> NDArray[np.str_]:
        return np.array([place.region for place in self.places], dtype=np.str_)

    @cached_property
    def jurisdiction(self) -> NDArray[np.str_]:
        return np.array([place.jurisdiction for place in self.places], dtype=np.str_)

    @cached_property
    def site(self) -> NDArray[np.str_]:
        return np.array([place.site for place in self.places], dtype=np.str_)

    @cached_property
    def node_id(self) -> NDArray[np.str_]:
        return np.array([place.node_id for place in self.places], dtype=np.str_)
