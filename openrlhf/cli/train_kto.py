"""Preference optimisation from single labelled responses (KTO)."""

from openrlhf.cli.entry import make_main

main = make_main("train_kto")

if __name__ == "__main__":
    main()
