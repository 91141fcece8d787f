"""Merge, convert or upload a trained model."""

from openrlhf.cli.entry import make_main

main = make_main("export")

if __name__ == "__main__":
    main()
