"""Worker processes that run user code, so that an exception, a hang or a crash fails one sample and not the run.

`Pool` assigns calls to processes and retries them, `WorkerProcess` is its handle of one process, and `Worker` runs the
user's code in that process. `messages` defines the messages between the two. An object that a Python caller passes
cannot leave its process: `WorkerThread` runs it in a thread, with the same deadlines and messages.

Programs that a model wrote are not user code: `program.run_program` isolates them from the machine.
"""
