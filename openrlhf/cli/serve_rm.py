"""Serve a reward model over HTTP."""

from openrlhf.cli.entry import make_main

main = make_main("serve_rm")

if __name__ == "__main__":
    main()
