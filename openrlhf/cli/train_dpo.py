"""Direct preference optimisation: DPO, IPO and cDPO."""

from openrlhf.cli.entry import make_main

main = make_main("train_dpo")

if __name__ == "__main__":
    main()
