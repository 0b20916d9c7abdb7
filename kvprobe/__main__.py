"""`python -m kvprobe` is the command `kvprobe`."""

from kvprobe.cli import main

if __name__ == "__main__":
    main()
