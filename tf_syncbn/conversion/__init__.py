"""`convert_model`: `towers.whole_batch` with the kernels of `sync_batch_norm` for the batch norms of an unchanged model."""
from tf_syncbn.conversion.convert import ConvertedLayer, convert_model

__all__ = ["ConvertedLayer", "convert_model"]
