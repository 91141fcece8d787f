"""openrlhf.cli.batch_inference under the path that older documents call: python examples/batch_inference.py {args}"""

from openrlhf.cli.batch_inference import main

if __name__ == "__main__":
    main()
