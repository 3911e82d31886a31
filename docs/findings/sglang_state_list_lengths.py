"""SGLang: a state list that is longer or shorter than its receiver's is sent all the same (since sglang #23323).

ENV/bin/python docs/findings/sglang_state_list_lengths.py longer | earlier | shorter      exit 1: wrong pages, unsaid
The word is what the prefill's list is; "earlier" is longer too, because it begins one page before the receiver's.
"""

import ctypes
import sys
from unittest.mock import MagicMock

import numpy as np
import on_cpu
from sglang.srt.disaggregation.base import conn
from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager

on_cpu.publish()
several = hasattr(conn, "StateType")  # newer releases have lists for several kinds of state
nest = (lambda values: [values]) if several else (lambda values: values)
plain = {"is_mla_backend": True, "is_hybrid_mla_backend": False, "enable_custom_mem_pool": False, "pp_size": 1}
plain |= {"attn_tp_size": 1, "max_transfer_batch_indices": 0, "state_strides_validated": {"peer"}}


def send(ours, theirs):
    source, target = np.repeat(np.arange(8, dtype=np.uint8), 64), np.full(512, 255, np.uint8)  # page 3 is full of 3
    args = MagicMock(state_type="swa", state_types=[conn.StateType.SWA] if several else [], prefill_start_layer=0)
    args.state_data_ptrs, args.state_item_lens = nest([source.ctypes.data]), nest([64])
    peer = MagicMock(dst_state_data_ptrs=nest([target.ctypes.data]), dst_state_item_lens=nest([64]))
    request, engine = MagicMock(mooncake_session_id="peer", room=7, dst_state_indices=nest(theirs)), MagicMock()
    engine.batch_transfer_sync = lambda _, froms, tos, sizes: list(map(ctypes.memmove, tos, froms, sizes)) and 0
    sender = on_cpu.bare(MooncakeKVManager, **plain, kv_args=args, engine=engine, request_status={7: 3})
    code = sender.maybe_send_extra(request, nest(ours), *([] if several else [peer.dst_state_data_ptrs]), None, peer)
    print(f"pages {ours} to pages {theirs}: code {code}, pages 4 to 6 of the receiver now hold", target[256:448:64])
    return None if code else target[256:448:64].tolist()


ours, theirs = ([1, 2], [4, 5, 6]) if sys.argv[1] == "shorter" else ([1, 2, 3], [4, 5])
right = {"longer": [1, 2, 255], "earlier": [2, 3, 255], "shorter": [1, 2, 3]}[sys.argv[1]]
assert send([1, 2], [4, 5]) == [1, 2, 255], "cannot drive"
sys.exit(int(send(ours, theirs) not in (None, right)))
