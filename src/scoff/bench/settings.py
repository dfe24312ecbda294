"""The sizes at which layers are measured."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from scoff.training.errors import UsageError


@dataclass(frozen=True)
class Setting:
    name: str
    batch: int
    length: int
    object_files: int
    size: int  # of one object file
    schemata: int
    positions: int = 1
    input: int = 64  # features, at each position

    @property
    def hidden(self) -> int:
        """Width of the whole state, and of the layers that SCOFF is compared with."""
        return self.object_files * self.size

    def __str__(self) -> str:
        positions = f"{self.positions} positions of " if self.positions > 1 else "input "
        return (
            f"{self.name}: {self.batch} sequences x {self.length} steps, {positions}{self.input}, "
            f"state {self.hidden} = {self.object_files} x {self.size}, {self.schemata} schemata"
        )


SETTINGS = {
    setting.name: setting
    for setting in (
        Setting("adding", 64, 50, object_files=5, size=60, schemata=2),
        Setting("balls", 64, 50, object_files=4, size=100, schemata=4, positions=64),
        Setting("balls-512", 512, 50, object_files=4, size=100, schemata=4, positions=64),
        Setting("maze", 512, 20, object_files=1, size=510, schemata=4),
    )
}
ON_CPU = ("adding",)  # the others take minutes


def choose_settings(
    names: Sequence[str], device_type: str, overrides: Mapping[str, int | None]
) -> list[Setting]:
    """Those named, or else those that suit the device; sizes that are not None replace theirs."""
    for name in names:
        if name not in SETTINGS:
            raise UsageError(f"--settings: got {name!r}, wants one of {', '.join(SETTINGS)}")
    given = {name: value for name, value in overrides.items() if value is not None}
    for name, value in given.items():
        if value < 1:
            raise UsageError(f"--{name.replace('_', '-')}: got {value}, wants at least 1")
    chosen = names or (tuple(SETTINGS) if device_type == "cuda" else ON_CPU)
    return [replace(SETTINGS[name], **given) for name in dict.fromkeys(chosen)]
