"""Check this machine, and say what to fix."""

from openrlhf.cli.entry import make_main

main = make_main("doctor")

if __name__ == "__main__":
    main()
