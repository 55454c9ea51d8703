"""How fast is the engine? Throughput, roofline, memory, time to a quality, costs of growth, and a peer beside it.

networks.py: what is attacked           workloads.py: targets and attacks on them     timing.py: turn by turn
throughput.py: lanes per second         scaling.py: time of twice the lanes           roofline.py     memory.py
quality.py: time to 20 and 30 dB        costs.py: growth of a step                    peer.py: breaching
regression.py: against a stored result  suite.py: all of it                           lanes.py: two source trees

Nothing is imported here: `lanes.py`, `networks.py` and `timing.py` also run with the package of another commit.
"""
