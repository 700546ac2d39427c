import torch

from kvferry_plugins import hookimpl


@hookimpl
def model_defaults(architecture):
    return {"kv_cache_config": {"dtype": str(torch.float32)}}
