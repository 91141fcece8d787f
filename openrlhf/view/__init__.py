"""`openrlhf view`: the curves and samples of runs as one local page, served or written to a file.

    launch                   the command: find the runs, then serve the page or write it
      server                 FastAPI on loopback; answers the page's requests as JSON
      report                 the same page as one file, with its data inlined
        page                 puts HTML, scripts and styles of `static/` together
    viewer                   answers for both: curves, samples and their tokens
      runs, metrics          find run folders; read what was added to metrics.jsonl
      records                read recorded samples, behind one interface
      sample_index           SQLite index over the records, for filters and search
      token_texts            the text of each token, from the run's tokenizer
    static/                  the page itself: plain HTML, CSS and JavaScript modules without a build step

Nothing here imports torch, so the page starts quickly. Model output is untrusted: Python never puts it into HTML, and
the scripts only set it as text.
"""
