"""What a cell holds, as one number.

They are in such an order that what the agent asks of a cell is a comparison: it can enter those
below OBJECT, and it cannot see past those from CLOSED_DOOR on.
"""

COLOURS = ("red", "green", "blue", "purple", "yellow", "grey")
KINDS = ("key", "ball", "box")
MISSIONS = tuple(f"go to the {colour} {kind}" for kind in KINDS for colour in COLOURS)

EMPTY = 0
OPEN_DOOR = 1  # + colour
OBJECT = OPEN_DOOR + len(COLOURS)  # + mission
CLOSED_DOOR = OBJECT + len(MISSIONS)  # + colour
WALL = CLOSED_DOOR + len(COLOURS)
# in views only
UNSEEN = WALL + 1
AGENT = UNSEEN + 1
NUM_CODES = AGENT + 1
