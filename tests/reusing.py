"""A backward that spoils what its forward has kept, as some libraries' do."""

import torch


class Reusing(torch.autograd.Function):
    """Squares x; its backward leaves its result where the forward had saved x."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.clone())
        return x * x

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        x.data.mul_(2 * dy)
        return x.clone()
