"""SGLang: what get_buf returned changes when its slot is given to the next request (sgl-project/sglang #23346).

ENV/bin/python docs/findings/sglang_metadata_views.py            exit 1: the bug is there
"""

import sys

import on_cpu
from sglang.srt.disaggregation.utils import ReqToMetadataIdxAllocator

on_cpu.publish()
buffers = on_cpu.metadata_buffers(1)
slots = ReqToMetadataIdxAllocator(1)
slot = slots.alloc()
buffers.output_hidden_states[slot] = 11  # the first request's draft state has arrived
hidden = next(each for each in buffers.get_buf(slot) if each is not None and each.shape == (32,) and each[0] == 11)
slots.free(slot)
assert slots.alloc() == slot
buffers.output_hidden_states[slot] = 22  # the next request's arrives in the same slot
print("the first request now holds", hidden[0].item(), "and was given 11")
sys.exit(int(hidden[0] != 11))
