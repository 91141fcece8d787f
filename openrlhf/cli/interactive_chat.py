"""Chat with a model."""

from openrlhf.cli.entry import make_main

main = make_main("interactive_chat")

if __name__ == "__main__":
    main()
