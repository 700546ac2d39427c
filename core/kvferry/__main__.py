"""``python -m kvferry`` is the command."""

from kvferry.cli.main import main

if __name__ == "__main__":
    main(prog_name="kvferry")
