"""Networks that the gradient-leakage papers attack, built exactly; their parameter counts are tests.

Every function returns `nn.Sequential(features, classifier)`: `features` maps images (batch, channels, height, width) to
the classifier's input (batch, features), `classifier` is the last linear layer, the output is logits. (One exception:
`mlp_sme(paper_quirks=True)`, whose logits pass a ReLU.) Only `unet` is no classifier: it predicts the noise in images.
No layer works in place and only BatchNorm keeps state, so all run under `torch.func` (vmap, forward mode, gradients of
gradients). In training mode BatchNorm needs its own copy of the buffers in every lane.

lenets.py   plain.py: perceptrons and stacks of convolutions   residual.py   modern.py: ConvNeXt, ResNetV2
transformers.py   unets.py   language.py: a causal decoder of token ids, no image classifier
pieces.py: their layers

Common options
  shape        (channels, height, width) of one image.
  activation   "sigmoid", "relu", "tanh", "elu", "gelu", "softplus", "leaky_relu", "silu"; or a function of no arguments
               that makes a module.
  norm         "batch", "group" (8 groups; gcd(8, channels) where 8 does not divide them), "layer" (over the channels of
               each pixel), "none"; or a function of the number of channels that makes a module.
  init         "torch": torch's default, weights and biases ~ U(-k, k) with k = 1 / sqrt(fan_in).
               "kaiming": weights of convolutions ~ N(0, 2 / fan_out), the rest as "torch". torchvision's ResNets.
               "lecun": weights ~ truncated normal of variance 1 / fan_in, biases zero. Flax's default.
               "uniform05": EVERY weight and bias ~ U(-0.5, 0.5), those of normalisation layers too. A number b: +-b.
  generator    the CPU generator that every random parameter is drawn from, layer by layer in the order of
               `model.named_parameters()`, weight before bias; None: torch's global one. With a generator the global one
               is not touched. Draws happen on the CPU, so a seed means the same weights on every machine. Except under
               a uniform `init`, normalisation layers start at 1 and 0 and draw nothing.
  paper_quirks behaviour of the authors' code that a reader of the paper would not expect; each function says what.
"""

from __future__ import annotations

from gradleak.models.lenets import lenet5, lenet_cpl, lenet_zhu
from gradleak.models.modern import ConvNeXtBlock, LayerScale, PreActivationBlock, convnext, resnetv2
from gradleak.models.pieces import Activation, ChannelLayerNorm, Init, Norm, Shape
from gradleak.models.plain import cnn_cifar, cnn_lewis, cnn_mnist, convnet, mlp, mlp_sme
from gradleak.models.residual import BasicBlock, resnet, resnet8, resnet18, resnet20_4
from gradleak.models.transformers import TransformerBlock, vit, vit_sme
from gradleak.models.unets import UNet, unet

__all__ = ["cnn_cifar", "cnn_lewis", "cnn_mnist", "convnet", "lenet5", "lenet_cpl", "lenet_zhu", "mlp", "mlp_sme"]
__all__ += ["convnext", "resnet", "resnet18", "resnet20_4", "resnet8", "resnetv2", "unet", "vit", "vit_sme"]
__all__ += ["Activation", "BasicBlock", "ChannelLayerNorm", "ConvNeXtBlock", "Init", "LayerScale", "Norm"]
__all__ += ["PreActivationBlock", "Shape", "TransformerBlock", "UNet"]
