"""Models whose experts NVIDIA Model-Optimizer has quantized (``modelopt.torch.quantization.quantize``) before
:func:`deepspeed_autoep.initialize`: their quantizers are cut with the experts, called, and described for checkpoints.

Model-Optimizer is not imported here, but by :func:`restore_structure`.
"""

from deepspeed_autoep.quantization.experts import BufferPart, describe_buffers
from deepspeed_autoep.quantization.structure import check_structure, restore_structure, structure_of

__all__ = ["BufferPart", "check_structure", "describe_buffers", "restore_structure", "structure_of"]
