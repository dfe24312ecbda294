"""What the kernels of the `fused` backend are compiled for."""

from typing import Any, NamedTuple


class Shape(NamedTuple):
    comm_scale: float
    epsilon: float
    F: int  # object files
    D: int  # numbers in one
    P: int  # positions
    A: int  # input heads
    C: int  # numbers in a key
    W: int  # in what a head sees
    V: int  # in what an object file reads
    S: int  # schemata
    H: int  # heads of the communication
    E: int  # numbers in its keys
    U: int  # in its values
    KEY_ROW: int
    KEY_HEAD: int  # from one head's key to the next; 0: they share it
    VALUE_ROW: int
    VALUE_HEAD: int
    SHARED: bool  # whether keys and values are the same tensor
    SAYS: int  # 2: what is said has a gate; 0: nothing is said
    KEPT: int  # a row of what is kept, and where in it things are: see `Fields`
    QUERY: int
    COMM_QUERY: int
    ASK: int
    READ: int
    MESSAGE: int
    RIGHT: int
    UPDATED: int
    HEARD: int
    LOGITS: int
    TALK: int
    MASS: int
    SEEN: int
    ACTIVE: int
    MEAN: bool
    LSTM: bool
    DETACH: bool  # whether errors stop at what is asked of the input
    HOLD: int  # of the weights in shared memory: none; what is asked and said; all
    SINGLE: bool  # whether each step is a sequence of its own
    SEQUENCES: int  # of a program
    R: int  # its columns
    DP: int  # padded: D, V, the larger of D and C, the larger of H * E and H * U
    VP: int
    AP: int
    TP: int
    CP: int
    WP: int
    HP: int
    SP: int
    ROWS: int  # of a block of a gate's weights: all of them or half
    RC: int  # columns of the communication, whose products want 16 with those of all heads
    PB: int  # positions of a block
    STAGES: int  # blocks of weights on their way
    ACC: Any  # the type of sums
    PRECISION: str
