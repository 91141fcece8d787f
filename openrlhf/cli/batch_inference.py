"""Generate, score and post-process responses for whole datasets."""

from openrlhf.cli.entry import make_main

main = make_main("batch_inference")

if __name__ == "__main__":
    main()
