"""Checkpoints that DeepSpeed's own engine wrote, read as the Hugging Face model's tensors. See :func:`open_stock`."""

from deepspeed_autoep.checkpoint.stock.kinds import StockKind, detect
from deepspeed_autoep.checkpoint.stock.reader import StockReader, open_stock
from deepspeed_autoep.checkpoint.stock.table import MASTER, WEIGHT, StockGroup

__all__ = ["MASTER", "WEIGHT", "StockGroup", "StockKind", "StockReader", "detect", "open_stock"]
