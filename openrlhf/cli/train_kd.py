"""Knowledge distillation from a teacher model."""

from openrlhf.cli.entry import make_main

main = make_main("train_kd")

if __name__ == "__main__":
    main()
