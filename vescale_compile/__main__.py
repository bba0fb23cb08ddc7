"""Command line: `python -m vescale_compile COMMAND`."""

import argparse
import importlib
import sys
from collections.abc import Sequence

COMMANDS = {
    "doctor": "check this machine and the installation, and say what to do",
    "explain": "show what the compiler makes of a model, without running it",
    "plan": "lay out a model's parameters for a number of ranks, without a GPU or the model",
    "simulate": "predict step time, exposed communication and memory on a described cluster",
    "train": "train a small Llama on text that is already on this machine",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    A command is a module `NAME_command` with `add_arguments(parser)` and `run(args)`; only the one that is
    called for is imported.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="python -m vescale_compile")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        if list(arguments[:1]) == [name]:
            module = importlib.import_module(f"vescale_compile.{name}_command")
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    args = parser.parse_args(arguments)
    status: int = args.run(args)
    return status


if __name__ == "__main__":
    sys.exit(main())
