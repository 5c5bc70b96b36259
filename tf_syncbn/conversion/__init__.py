"""Every batch norm of an unchanged model function found in its graph, and replaced by a synced one."""
from tf_syncbn.conversion.convert import ConvertedLayer, convert_model

__all__ = ["ConvertedLayer", "convert_model"]
