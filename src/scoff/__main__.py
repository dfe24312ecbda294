"""Entry point of the `scoff` command, which works as far as what is installed allows."""

import sys

EXTRA = dict.fromkeys(
    ("jinja2", "lightning_fabric", "matplotlib", "safetensors", "tensorboard", "tqdm", "tyro"),
    "experiments",
) | {"h5py": "data", "numpy": "data", "PIL": "data"}


def main() -> None:
    try:
        from scoff.cli import main

        main()
    except ModuleNotFoundError as error:
        extra = EXTRA.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        print(f"scoff: {error.name} is missing: pip install 'scoff[{extra}]'", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
