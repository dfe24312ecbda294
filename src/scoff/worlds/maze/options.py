"""What kind of maze it is."""

from dataclasses import dataclass
from numbers import Integral

# rooms that were reached are the bits of an int64
MAX_ROOMS = 62
# the cells in view are looked up in a table of 4 * cells * view_size**2 entries
MAX_SIDE = 128
# visibility is looked up in a table of 4**view_size entries
MAX_VIEW = 9


def as_integer(name: str, value: object) -> int:
    """A plain one of any kind of integer, NumPy's among them; True and False are none."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise ValueError(f"{name}: got {value!r}, wants an integer")
    return int(value)


@dataclass(frozen=True)
class MazeOptions:
    """BabyAI's GoToObjMaze, unless told otherwise, but for its view, which is that of the paper."""

    room_size: int = 8
    """Cells a side, walls included: a room of 8 has 6 by 6 cells to stand on."""
    num_rows: int = 3
    num_cols: int = 3
    view_size: int = 5
    """The agent sees so many cells ahead, its own among them, and as many across."""
    doors_open: bool = False

    def __post_init__(self) -> None:
        for name in ("room_size", "num_rows", "num_cols", "view_size"):
            object.__setattr__(self, name, as_integer(name, getattr(self, name)))
        if not isinstance(self.doors_open, bool):
            raise ValueError(f"doors_open: got {self.doors_open!r}, wants True or False")
        if self.room_size < 4:
            raise ValueError(
                f"room_size: got {self.room_size}, wants an integer of at least 4: two walls and "
                "two cells between them"
            )
        if self.view_size % 2 == 0 or not 3 <= self.view_size <= MAX_VIEW:
            raise ValueError(
                f"view_size: got {self.view_size}, wants an odd number from 3 to {MAX_VIEW}: the "
                "agent is in the middle of its row"
            )
        for name, rooms in (("num_rows", self.num_rows), ("num_cols", self.num_cols)):
            if rooms < 1:
                raise ValueError(f"{name}: got {rooms}, wants an integer of at least 1")
            side = self._side(rooms)
            if side > MAX_SIDE:
                raise ValueError(
                    f"{name}: got {rooms}, and so many rooms of {self.room_size} take {side} "
                    f"cells; wants at most {MAX_SIDE}"
                )
        if self.num_rooms > MAX_ROOMS:
            raise ValueError(
                f"num_rows, num_cols: got {self.num_rows} and {self.num_cols}, that is "
                f"{self.num_rooms} rooms; wants at most {MAX_ROOMS}"
            )

    def _side(self, rooms: int) -> int:
        return rooms * (self.room_size - 1) + 1  # neighbours share a wall

    @property
    def height(self) -> int:
        return self._side(self.num_rows)

    @property
    def width(self) -> int:
        return self._side(self.num_cols)

    @property
    def interior(self) -> int:
        """Cells a side of a room without its walls"""
        return self.room_size - 2

    @property
    def num_rooms(self) -> int:
        return self.num_rows * self.num_cols

    @property
    def num_walls(self) -> int:
        """Walls between two rooms"""
        return self.num_rows * (self.num_cols - 1) + (self.num_rows - 1) * self.num_cols

    @property
    def max_steps(self) -> int:
        return self.room_size**2 * self.num_rooms
