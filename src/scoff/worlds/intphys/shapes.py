"""Where rays meet spheres, boxes and cones that stand at the origin.

A ray is origin + t · direction, all three given as x, y, z apart. Directions need not have length
1. `half` is half of a shape's size along each axis; a cone's tip is at the top. Where a ray misses,
or where the shape is behind it, t is FAR.
"""

from scoff.worlds.intphys.arrays import Array, namespace

NONE, SPHERE, BOX, CONE = 0, 1, 2, 3
NAMES = {SPHERE: "Sphere", BOX: "Cube", CONE: "Cone"}

FAR = 1.0e6
NEAR = 1.0e-3
_TINY = 1.0e-7

Vector = tuple[Array, Array, Array]


def hit_sphere(origin: Vector, direction: Vector, half: Vector) -> Array:
    xp = namespace(origin[0])
    a = dot(direction, direction)
    b = dot(origin, direction)
    c = dot(origin, origin) - half[0] * half[0]
    inside = b * b - a * c
    t = (-b - xp.sqrt(xp.where(inside > 0, inside, 0 * inside))) / a
    return xp.where((inside > 0) & (t > NEAR), t, FAR + 0 * t)


def hit_box(origin: Vector, direction: Vector, half: Vector) -> Array:
    xp = namespace(origin[0])
    enter, leave = None, None
    for o, d, h in zip(origin, direction, half, strict=True):
        d = _not_zero(d)
        one, other = (-h - o) / d, (h - o) / d
        first, last = xp.minimum(one, other), xp.maximum(one, other)
        enter = first if enter is None else xp.maximum(enter, first)
        leave = last if leave is None else xp.minimum(leave, last)
    assert enter is not None
    return xp.where((enter < leave) & (enter > NEAR), enter, FAR + 0 * enter)


def hit_cone(origin: Vector, direction: Vector, half: Vector) -> Array:
    xp = namespace(origin[0])
    x, y, z = origin
    dx, dy, dz = direction
    radius, tall, _ = half
    slope = radius / (tall + tall)
    slope = slope * slope
    below = tall - y  # how far under the tip
    a = _not_zero(dx * dx + dz * dz - slope * dy * dy)
    b = x * dx + z * dz + slope * below * dy
    c = x * x + z * z - slope * below * below
    inside = b * b - a * c
    root = xp.sqrt(xp.where(inside > 0, inside, 0 * inside))
    best = FAR + 0 * inside
    for t in ((-b - root) / a, (-b + root) / a):
        # the equation is also that of a second cone, on top of the tip
        is_on = (inside > 0) & (t > NEAR) & (xp.abs(y + t * dy) < tall)
        best = xp.where(is_on & (t < best), t, best)
    t = (-tall - y) / _not_zero(dy)
    across, along = x + t * dx, z + t * dz
    is_on = (t > NEAR) & (across * across + along * along < radius * radius)
    return xp.where(is_on & (t < best), t, best)


HIT = {SPHERE: hit_sphere, BOX: hit_box, CONE: hit_cone}


def normal(kind: int, point: Vector, half: Vector) -> Vector:
    """Outwards, of length 1, at a point of the surface"""
    xp = namespace(point[0])
    x, y, z = point
    if kind == SPHERE:
        return x / half[0], y / half[0], z / half[0]
    if kind == BOX:
        # the side that the point is nearest to
        depth = [h - xp.abs(p) for p, h in zip(point, half, strict=True)]
        is_x = (depth[0] <= depth[1]) & (depth[0] <= depth[2])
        is_y = ~is_x & (depth[1] <= depth[2])
        is_z = ~is_x & ~is_y
        nothing = 0 * x
        return (
            xp.where(is_x, _sign(x), nothing),
            xp.where(is_y, _sign(y), nothing),
            xp.where(is_z, _sign(z), nothing),
        )
    radius, tall, _ = half
    slope = radius / (tall + tall)
    away = xp.sqrt(x * x + z * z) + _TINY
    lean = xp.sqrt(1 + slope * slope)
    is_base = y < -tall + 1.0e-4 * (tall + tall)
    return (
        xp.where(is_base, 0 * x, x / away / lean),
        xp.where(is_base, -1 + 0 * x, slope / lean + 0 * x),
        xp.where(is_base, 0 * x, z / away / lean),
    )


def dot(one: Vector, other: Vector) -> Array:
    return one[0] * other[0] + one[1] * other[1] + one[2] * other[2]


def _sign(x: Array) -> Array:
    xp = namespace(x)
    return xp.where(x < 0, -1 + 0 * x, 1 + 0 * x)


def _not_zero(x: Array) -> Array:
    xp = namespace(x)
    return xp.where(xp.abs(x) < _TINY, _TINY + 0 * x, x)
