"""Measurements that a reader can repeat: `kvcache bench NAME`, one module each, whose `tables()` measures and tells.

Timings are medians over many rounds, contenders alternate inside one run, and ratios are what travels between machines.
"""
