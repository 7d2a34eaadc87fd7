"""Training data: files of examples become micro-batches of tokens, in an order that only the seed and the step decide.

files.py, tables.py   examples out of files, each with the line it stands in
shapes.py             an example as a conversation, a prompt with its completion, or a text
chat.py, encode.py    its tokens, and which of them are learnt
cache.py, prepare.py  all of them on disk, once
order.py, packing.py  which examples a step gets
batches.py            TokenData: the micro-batches of a step
packed_model.py       whether a model keeps packed examples apart
"""
