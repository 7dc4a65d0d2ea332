"""LoRA adapters: their files, their places in the engine, and what they add to a step's products.

peft_config, adapter_file   what lies in an adapter's folder, checked
adapter, adapter_rows       what of it is in memory, and whose rows a step has
adapted_linear              the products
service, admission          names, who uses what, and how many in a step; without torch
options                     the flags
"""
