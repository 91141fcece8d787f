"""Show the curves and samples of runs in a browser."""

from openrlhf.cli.entry import make_main

main = make_main("view")

if __name__ == "__main__":
    main()
