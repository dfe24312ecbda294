"""Where a run is carried out: devices, processes that torchrun started, their random numbers."""

import atexit
import logging
import os
import warnings
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from lightning_fabric import Fabric
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from scoff.training.data import seed_for
from scoff.training.errors import UsageError

Precision = Literal["32-true", "bf16-mixed"]

log = logging.getLogger(__name__)
logging.getLogger("lightning_fabric").setLevel(logging.WARNING)  # it asks for INFO when imported


def pick_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"--device: got {name!r}, wants cpu, cuda, cuda:1 or auto") from error
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"--device: got {name!r}, wants cpu, cuda, cuda:1 or auto")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise UsageError(f"--device: got {name!r}, but torch finds {count or 'no'} GPU")
    return device


def make_fabric(device: torch.device, precision: Precision) -> Fabric:
    """One process, or those that torchrun started."""
    if device.type == "cuda":
        # the same bits from the same inputs, where cuBLAS and cuDNN have a choice
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.deterministic = True
    world = world_size()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if world > 1 else 1
    devices: Any = local
    if device.type == "cuda" and world == 1:
        devices = [device.index or 0]
    if world > 1:
        join_processes(device, world)
    fabric = Fabric(
        accelerator=device.type,
        devices=devices,
        num_nodes=world // local,
        strategy="ddp" if world > 1 else "auto",
        precision=precision,
    )
    fabric.launch()
    return fabric


def join_processes(device: torch.device, world: int) -> None:
    """As Fabric would, but with keys of our own in torchrun's store. It outlives a restart: a
    process could find the address of another that is gone."""
    warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
    atexit.register(leave_processes)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(address, port, world, is_master=False)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=PrefixStore(f"attempt {attempt}", store),
        rank=int(os.environ["RANK"]),
        world_size=world,
    )


def leave_processes() -> None:
    """Threads that outlive the interpreter would abort a process that has done its work."""
    if dist.is_initialized():
        dist.destroy_process_group()


def world_size() -> int:
    """How many processes torchrun started."""
    return int(os.environ.get("WORLD_SIZE", 1)) if "TORCHELASTIC_RUN_ID" in os.environ else 1


def rank() -> int:
    """This process's number among them."""
    return int(os.environ.get("RANK", 0)) if world_size() > 1 else 0


def gather(fabric: Fabric, tensor: Tensor) -> list[Tensor]:
    """Every process's."""
    if fabric.world_size == 1:
        return [tensor]
    return list(cast(Tensor, fabric.all_gather(tensor)).cpu())


def collect_random(fabric: Fabric) -> list[dict[str, Tensor]]:
    """The state of each process's random number generators."""
    own = {"cpu": torch.get_rng_state()}
    if fabric.device.type == "cuda":
        own["cuda"] = torch.cuda.get_rng_state(fabric.device)
    gathered = {name: gather(fabric, state) for name, state in own.items()}
    return [
        {name: states[rank] for name, states in gathered.items()}
        for rank in range(fabric.world_size)
    ]


def restore_random(states: list[dict[str, Tensor]], fabric: Fabric, other_seed: int) -> None:
    """`other_seed` is for when the states are of other devices or another number of processes."""
    if len(states) != fabric.world_size or ("cuda" in states[0]) != (fabric.device.type == "cuda"):
        log.warning(
            "the run goes on with %d processes on %s instead of %d: noise will differ",
            fabric.world_size,
            fabric.device.type,
            len(states),
        )
        torch.manual_seed(seed_for(other_seed, fabric.global_rank))
        return
    own = states[fabric.global_rank]
    torch.set_rng_state(own["cpu"])
    if "cuda" in own:
        torch.cuda.set_rng_state(own["cuda"], fabric.device)
