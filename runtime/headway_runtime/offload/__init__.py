"""Where prefix blocks go that the KV cache has no room for: host memory, and from there a local disk.

    prefix_cache ── tiers.KVOffload ─┬─ host_index   which block's contents lie in which slot of host memory
      (decides)     (plans, counts)  └─ disk_tier    which lie in files; a thread that reads and writes them
    runner ──────── host_blocks      the slots themselves, and copies between them and the KV cache
                    host_memory      what they lie in
                    staged_copies    the copies of a GPU

Only the last three import torch.
"""
