"""Places as columns, so that a rule is checked for all nodes at once."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from mesh.identity.place import Place


class PlaceColumns:
    """String arrays over places, shape [n_places]; a column is made when a rule first asks for it."""

    def __init__(self, places: tuple[Place, ...]) -> None:
        self._places = places

    def __len__(self) -> int:
        return len(self._places)

    @cached_property
    def tier(self) -> NDArray[np.str_]:
        return np.array([place.tier.value for place in self._places], dtype=np.str_)

    @cached_property
    def region(self) -> NDArray[np.str_]:
        return np.array([place.region for place in self._places], dtype=np.str_)

    @cached_property
    def jurisdiction(self) -> NDArray[np.str_]:
        return np.array([place.jurisdiction for place in self._places], dtype=np.str_)

    @cached_property
    def site(self) -> NDArray[np.str_]:
        return np.array([place.site for place in self._places], dtype=np.str_)

    @cached_property
    def node_id(self) -> NDArray[np.str_]:
        return np.array([place.node_id for place in self._places], dtype=np.str_)
