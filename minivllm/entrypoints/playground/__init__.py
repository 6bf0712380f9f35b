"""The playground: the real scheduler and block manager in a web page, run by Python in the reader's browser (Pyodide), in a worker.

`session.py` is what runs there. The page draws with the live page's modules, from the same reports.
"""
