"""Paged key-value memory: which page belongs to whom. Ids and counts only; the bytes belong to the runner.

The pool hands out equal sectors. A sector given to a request for one group of layers is cut into blocks, each of which
holds `page_size` tokens of all layers of that group (layout.py). Where all layers are alike a sector is one block, and
that is what is called a page.
"""
