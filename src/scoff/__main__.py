"""Entry point of the `scoff` command, which works as far as what is installed allows."""

import sys

EXTRA = ("jinja2", "lightning_fabric", "matplotlib", "safetensors", "tensorboard", "tqdm", "tyro")


def main() -> None:
    try:
        from scoff.cli import main

        main()
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in EXTRA:
            raise
        print(f"scoff: {error.name} is missing: pip install 'scoff[experiments]'", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
