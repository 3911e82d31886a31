"""SGLang: a state list that is longer or shorter than its receiver's is sent all the same (sgl-project/sglang #23323).

ENV/bin/python docs/findings/sglang_state_list_lengths.py        exit 1: unequal lists are taken for success
"""

import ctypes
import sys
from types import SimpleNamespace as Box

import numpy as np
import on_cpu
from sglang.srt.disaggregation.base import conn
from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager

on_cpu.publish()
several = hasattr(conn, "StateType")  # newer releases have lists for several kinds of state
plain = {"attn_tp_size": 1, "pp_size": 1, "enable_custom_mem_pool": False, "max_transfer_batch_indices": 0}
plain |= {"is_mla_backend": True, "is_hybrid_mla_backend": False, "state_strides_validated": {"peer"}}


def move(session, sources, targets, lengths):
    return sum(ctypes.memmove(*each) * 0 for each in zip(targets, sources, lengths, strict=True))


def send(ours, theirs):
    nest = (lambda values: [values]) if several else (lambda values: values)
    source, target = np.repeat(np.arange(8, dtype=np.uint8), 64), np.full(512, 255, np.uint8)
    args = Box(state_type="nsa", state_types=[conn.StateType.SWA] if several else [], state_layer_ids=[])
    vars(args).update(state_data_ptrs=nest([source.ctypes.data]), state_item_lens=nest([64]), state_dim_per_tensor=[])
    peer = Box(dst_state_data_ptrs=nest([target.ctypes.data]), dst_state_item_lens=nest([64]), dst_attn_tp_size=1)
    vars(peer).update(dst_state_dim_per_tensor=[], dst_state_layer_ids=[])
    args.prefill_start_layer, request = 0, Box(room=7, mooncake_session_id="peer", dst_state_indices=nest(theirs))
    sender = on_cpu.bare(MooncakeKVManager, **plain, kv_args=args, request_status={7: 3})
    sender.engine = Box(batch_transfer_sync=move)
    code = sender.maybe_send_extra(request, nest(ours), *([] if several else [peer.dst_state_data_ptrs]), None, peer)
    print(f"pages {ours} to {theirs}: code {code}, the receiver's pages now hold {target[::64].tolist()}")
    return code


assert send([1, 2, 3], [4, 5, 6]) == 0, "cannot drive"
sys.exit(int(0 in [send([1, 2, 3], [4, 5]), send([1, 2], [4, 5, 6])]))
