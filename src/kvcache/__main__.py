"""`python -m kvcache` is the command `kvcache`."""

from kvcache.cli import main

if __name__ == "__main__":
    main()
