"""What surfaces look like: tiles, bricks, patches, sky. Brightness is from integer hashes."""

from scoff.worlds.intphys.arrays import Array, namespace, real, whole
from scoff.worlds.intphys.shapes import BOX, Vector

CLEAR = 30.0  # metres: tiles that far away have half their contrast
HAZE = 80.0  # and colours are half the horizon's
AMBIENT = 0.46
SUNLIGHT = 0.72


def speckle(x: Array, y: Array, z: Array, grain: Array) -> Array:
    """A number on [0, 1) for each cell  int32 -> float32"""
    mixed = (x * 73856093) ^ (y * 19349663) ^ (z * 83492791) ^ (grain * 668265263)
    mixed = (mixed ^ (mixed >> 13)) * 1274126177
    return real((mixed >> 15) & 255) * (1 / 256)


def tiles(x: Array, z: Array, colours: tuple[Vector, Vector], grain: Array, far: Array) -> Vector:
    """The floor at a place; from afar, where tiles are finer than pixels, the mean of all"""
    xp = namespace(x)
    across, along = whole(x * 0.55), whole(z * 0.55)
    is_even = ((across + along) & 1) == 0
    shade = 0.94 + 0.12 * speckle(across, along, along * 0, grain)
    clear = 1 - far / (CLEAR + far)
    light, dark = colours

    def channel(a: Array, b: Array) -> Array:
        middle = 0.5 * (a + b)
        tile = xp.where(is_even, a + 0 * shade, b + 0 * shade) * shade
        return middle + (tile - middle) * clear

    return (
        channel(light[0], dark[0]),
        channel(light[1], dark[1]),
        channel(light[2], dark[2]),
    )


def bricks(x: Array, y: Array, grain: Array) -> Array:
    """Brightness of a wall at a place on it"""
    xp = namespace(x)
    height = y * 3.3
    row = whole(height)
    across = x * 1.7 + 0.5 * real(row & 1)
    column = whole(across)
    in_mortar = (height - real(row) < 0.14) | (across - real(column) < 0.07)
    shade = 0.84 + 0.3 * speckle(column, row, row * 0, grain)
    return xp.where(in_mortar, 0.62 + 0 * shade, shade)


def patches(point: Vector, half: Vector, grain: Array) -> Array:
    """Brightness of an object at a place on it"""
    x, y, z = (whole(p / h * 1.5 + 0.5) for p, h in zip(point, half, strict=True))
    return 0.80 + 0.32 * speckle(x, y, z, grain)


def brightness(kind: int, is_wall: bool, point: Vector, half: Vector, grain: Array) -> Array:
    if is_wall:
        assert kind == BOX
        return bricks(point[0], point[1], grain)
    return patches(point, half, grain)


def heaven(rise: Array, colours: tuple[Vector, Vector]) -> Vector:
    """Sky, by how steep one looks up"""
    xp = namespace(rise)
    rise = xp.where(rise > 0, rise, 0 * rise)
    high = rise / (rise + 0.25)
    low, top = colours
    return (
        low[0] + (top[0] - low[0]) * high,
        low[1] + (top[1] - low[1]) * high,
        low[2] + (top[2] - low[2]) * high,
    )


def lit(albedo: Vector, upward: Array, facing: Array, in_shadow: Array) -> Vector:
    """Diffuse light of the sky, more from above, and of the sun where nothing is in its way"""
    xp = namespace(facing)
    sun = xp.where(in_shadow | (facing < 0), 0 * facing, facing)
    light = AMBIENT * (0.72 + 0.28 * upward) + SUNLIGHT * sun
    return albedo[0] * light, albedo[1] * light, albedo[2] * light


def hazy(colour: Vector, far: Array, horizon: Vector) -> Vector:
    haze = far / (HAZE + far)
    return (
        colour[0] + (horizon[0] - colour[0]) * haze,
        colour[1] + (horizon[1] - colour[1]) * haze,
        colour[2] + (horizon[2] - colour[2]) * haze,
    )
