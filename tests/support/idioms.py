"""Small versions of what public PyTorch models do with their parameters, and data for each."""

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import parametrizations

WIDTH, HEADS, WORDS, CLASSES = 8, 2, 11, 3
TOKENS = 20  # as many as a batch of the probe has samples, and a multiple of many cohorts' number of samples


def heads(x):
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


class Attention(nn.Module):
    """As in timm and nanoGPT: one projection to queries, keys and values."""

    def __init__(self, causal=False):
        super().__init__()
        self.qkv, self.out, self.causal = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), causal

    def forward(self, x):
        q, k, v = (heads(part) for part in self.qkv(x).split(WIDTH, dim=2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).reshape(x.shape))


class LayerScale(nn.Module):
    def __init__(self):
        super().__init__()
        self.gamma = nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, x):
        return x * self.gamma


class ViT(nn.Module):
    """timm: a class token, positions, and a scale after every block."""

    def __init__(self):
        super().__init__()
        self.cls_token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.pos_embed = nn.Parameter(torch.randn(1, 17, WIDTH))
        self.patch, self.norm1, self.norm2 = nn.Conv2d(3, WIDTH, 2, 2), nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.scale, self.head = Attention(), LayerScale(), nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1) + self.pos_embed
        x = x + self.scale(self.attn(self.norm1(x)))
        return self.head(self.norm2(x)[:, 0])


class ResizedPositions(nn.Module):
    """timm and MAE: positions of a grid, resized to that of the image, and a token that replaces masked patches."""

    def __init__(self):
        super().__init__()
        self.pos_embed, self.mask_token = nn.Parameter(torch.randn(1, 4, WIDTH)), nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.patch, self.head = nn.Conv2d(3, WIDTH, 2, 2), nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        grid = self.pos_embed.reshape(1, 2, 2, -1).permute(0, 3, 1, 2)
        grid = F.interpolate(grid, size=(4, 4), mode="bilinear", align_corners=False)
        tokens = self.mask_token.repeat(x.shape[0], x.shape[1], 1)
        x = torch.where((x[:, :, :1] > 0.5), tokens, x) + grid.permute(0, 2, 3, 1).flatten(1, 2)
        return self.head(torch.tanh(x).mean(1))


class Bias(nn.LayerNorm):
    """nanoGPT: a norm that calls the function with its own parameters."""

    def forward(self, x):
        return F.layer_norm(x, self.weight.shape, self.weight, None, 1e-5)


class NanoGPT(nn.Module):
    """Positions as numbers without an axis of samples, and an output layer with the embedding's weight."""

    def __init__(self, direct=False):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(WORDS, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.norm, self.attn, self.direct = Bias(WIDTH), Attention(causal=True), direct
        if not direct:
            self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
            self.lm_head.weight = self.wte.weight

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        x = self.norm(x + self.attn(self.norm(x))).mean(1)
        return (F.linear(x, self.wte.weight) if self.direct else self.lm_head(x))[:, :CLASSES]


class RMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        wide = x.double()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Llama(nn.Module):
    """Rotary positions from a buffer, a norm of its own, gated units, one key for several queries."""

    def __init__(self):
        super().__init__()
        self.words, self.norm = nn.Embedding(WORDS, WIDTH), RMSNorm()
        self.q, self.k, self.v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH // 2), nn.Linear(WIDTH, WIDTH // 2)
        self.gate, self.up, self.head = nn.Linear(WIDTH, 12), nn.Linear(WIDTH, 12), nn.Linear(12, CLASSES)
        angles = torch.outer(torch.arange(TOKENS), torch.tensor([1.0, 0.1])).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def rotated(self, x):
        first, second = x.chunk(2, -1)
        return x * self.cos + torch.cat((-second, first), -1) * self.sin

    def forward(self, tokens):
        x = self.norm(self.words(tokens))
        q, k, v = heads(self.q(x)), self.k(x).unsqueeze(1), self.v(x).unsqueeze(1)
        q, k = self.rotated(q).to(v.dtype), self.rotated(k).to(v.dtype)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = self.norm(x + mixed.transpose(1, 2).flatten(2))
        return self.head(F.silu(self.gate(x)) * self.up(x)).mean(1)


class RelativeBias(nn.Module):
    """Swin and T5: a table of biases, looked up by distance and added to the scores of windows of the images."""

    def __init__(self, as_mask=False):
        super().__init__()
        self.table, self.qkv = nn.Parameter(torch.randn(7, HEADS)), nn.Linear(WIDTH, 3 * WIDTH)
        self.distances, self.head, self.as_mask = nn.Embedding(7, HEADS), nn.Linear(WIDTH, CLASSES), as_mask
        self.embed = nn.Linear(3, WIDTH)
        places = torch.arange(4)
        self.register_buffer("index", places[:, None] - places[None] + 3, persistent=False)

    def forward(self, x):
        x = self.embed(x.movedim(1, -1)).flatten(1, 2)
        windows = x.reshape(-1, 4, WIDTH)  # [samples * windows, 4, features]
        q, k, v = (heads(part) for part in self.qkv(windows).chunk(3, -1))
        bias = self.table[self.index.view(-1)].view(4, 4, -1).permute(2, 0, 1).contiguous()
        bias = bias.unsqueeze(0) + self.distances(self.index).permute(2, 0, 1)
        if self.as_mask:
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        else:
            mixed = (q @ k.transpose(-2, -1) + bias).softmax(-1) @ v
        return self.head(mixed.transpose(1, 2).reshape(len(x), -1, WIDTH).mean(1))


class TimeFirst(nn.Module):
    """torch's tutorial: `nn.TransformerEncoder` with its default order of axes, and positions from a buffer."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 12, 0.1)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(WIDTH, CLASSES)
        self.register_buffer("pe", torch.linspace(-1, 1, TOKENS * WIDTH).view(TOKENS, 1, WIDTH))
        self.place = nn.Parameter(torch.randn(TOKENS, 1, WIDTH))

    def forward(self, tokens):
        x = self.words(tokens).permute(1, 0, 2)
        mask = nn.Transformer.generate_square_subsequent_mask(len(x), device=x.device, dtype=x.dtype)
        return self.head(self.encoder(x + self.pe[: x.size(0)] + self.place, mask)[-1])


class Queries(nn.Module):
    """DETR: the weight of an embedding as queries of a decoder, repeated for every sample on the second axis."""

    def __init__(self):
        super().__init__()
        self.query_embed, self.embed = nn.Embedding(5, WIDTH), nn.Linear(3, WIDTH)
        self.row_embed = nn.Parameter(torch.rand(8, WIDTH // 2))
        self.col_embed = nn.Parameter(torch.rand(8, WIDTH // 2))
        self.decoder = nn.TransformerDecoderLayer(WIDTH, HEADS, 12, 0.0)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        h = self.embed(x.movedim(1, -1))
        high, wide = h.shape[1:3]
        columns = self.col_embed[:wide].unsqueeze(0).repeat(high, 1, 1)
        rows = self.row_embed[:high].unsqueeze(1).repeat(1, wide, 1)
        memory = torch.cat([columns, rows], -1).flatten(0, 1).unsqueeze(1) + h.flatten(1, 2).permute(1, 0, 2)
        queries = self.query_embed.weight.unsqueeze(1).repeat(1, len(x), 1)
        return self.head(self.decoder(queries, memory).mean(0))


class Perceiver(nn.Module):
    """Latents that attend to the input, normalised before they are repeated."""

    def __init__(self):
        super().__init__()
        self.latents, self.words = nn.Parameter(torch.randn(5, WIDTH)), nn.Embedding(WORDS, WIDTH)
        self.norm, self.key, self.value = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.query, self.attn = nn.Linear(WIDTH, WIDTH), nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens):
        x = self.words(tokens)
        latents = self.norm(self.latents)
        scores = torch.einsum("qd,nkd->nqk", self.query(latents), self.key(x))
        mixed = scores.softmax(-1) @ self.value(x)
        latents = latents[None].broadcast_to(len(x), 5, WIDTH) + mixed
        return self.head(self.attn(latents, x, x, need_weights=False)[0].mean(1))


class TabularTransformer(nn.Module):
    """FT-Transformer: every number times a vector of its own, and a class token at the end."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(6, WIDTH)), nn.Parameter(torch.randn(6, WIDTH))
        self.cls, self.attn, self.head = nn.Parameter(torch.randn(WIDTH)), Attention(), nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = self.weight[None] * x[..., None] + self.bias[None]
        x = torch.cat([x, self.cls.expand(len(x), 1, -1)], dim=1)
        return self.head(self.attn(x)[:, -1])


class Clip(nn.Module):
    """Cosines to learned class vectors, times a learned scale; distances to learned prototypes."""

    def __init__(self):
        super().__init__()
        self.body, self.classes = nn.Linear(6, WIDTH), nn.Parameter(torch.randn(CLASSES, WIDTH))
        self.logit_scale, self.radius = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.tensor(0.3))
        self.prototypes = nn.Parameter(torch.randn(CLASSES, WIDTH))

    def forward(self, x):
        x = F.normalize(self.body(x), dim=-1)
        cosines = self.logit_scale.exp() * x @ F.normalize(self.classes, dim=-1).t()
        return cosines - F.softplus(self.radius) * (x.unsqueeze(1) - self.prototypes).pow(2).sum(-1)


class GraphLayer(nn.Module):
    """A X W + b, with attention along the edges as in GAT; the adjacency matrix is an input."""

    def __init__(self, features):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(features, WIDTH) / 3), nn.Parameter(torch.zeros(WIDTH))
        self.a = nn.Parameter(torch.randn(2 * WIDTH, 1) / 3)

    def forward(self, x, adjacency):
        h = torch.matmul(x, self.weight)
        scores = torch.matmul(h, self.a[:WIDTH]) + torch.matmul(h, self.a[WIDTH:]).transpose(1, 2)
        scores = F.leaky_relu(scores).masked_fill(adjacency == 0, -9e15)
        return torch.bmm(scores.softmax(-1), h) + self.bias


class Graph(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = GraphLayer(3), GraphLayer(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, nodes, adjacency):
        return self.head(self.second(F.elu(self.first(nodes, adjacency)), adjacency).mean(1))


class StandardisedConv2d(nn.Conv2d):
    """BiT and NFNets: the weight is normalised before it is used, and scaled per channel."""

    def __init__(self, *sizes, **options):
        super().__init__(*sizes, **options)
        self.gain = nn.Parameter(torch.ones(self.out_channels, 1, 1, 1))

    def forward(self, x):
        variance, mean = torch.var_mean(self.weight, dim=[1, 2, 3], keepdim=True)
        weight = self.gain * (self.weight - mean) / torch.sqrt(variance + 1e-5)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding)


class ConvNeXt(nn.Module):
    """A depthwise convolution, a norm over channels, a scale per channel, squeeze and excite, PReLU, an FPN's sum."""

    def __init__(self):
        super().__init__()
        self.stem = StandardisedConv2d(3, WIDTH, 3, padding=1)
        self.deep = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)
        self.norm, self.act = nn.LayerNorm(WIDTH), nn.PReLU(WIDTH)
        self.gamma = nn.Parameter(torch.full((WIDTH, 1, 1), 0.3))
        self.reduce, self.grow = nn.Conv2d(WIDTH, 2, 1), nn.Conv2d(2, WIDTH, 1)
        self.down = nn.Conv2d(WIDTH, WIDTH, 3, 2, 1)
        self.mix, self.head = nn.Parameter(torch.ones(2)), nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = self.act(self.stem(x))
        x = x + self.gamma * self.norm(self.deep(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        x = x * torch.sigmoid(self.grow(F.relu(self.reduce(F.adaptive_avg_pool2d(x, 1)))))
        shares = F.relu(self.mix) / (F.relu(self.mix).sum() + 1e-4)  # as in EfficientDet
        x = shares[0] * x + shares[1] * F.interpolate(self.down(x), size=x.shape[-2:], mode="nearest")
        return self.head(x.mean((2, 3)))


class FirstState(nn.Module):
    """A learned first state of a GRU, repeated on its second axis; a cell in a loop of Python; the last output."""

    def __init__(self):
        super().__init__()
        self.words, self.gru = nn.Embedding(WORDS, 4), nn.GRU(4, WIDTH, batch_first=True)
        self.h0 = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.cell, self.head = nn.LSTMCell(WIDTH, 5), nn.Linear(5, CLASSES)

    def forward(self, tokens):
        outputs, _ = self.gru(self.words(tokens), self.h0.expand(-1, tokens.size(0), -1).contiguous())
        state = None
        for t in range(3):
            state = self.cell(outputs[:, -1 - t], state)
        return self.head(state[0])


class Experts(nn.Module):
    """Weights of all experts in one tensor, and a mixture of layers' outputs as in ELMo."""

    def __init__(self):
        super().__init__()
        self.w1, self.w2 = nn.Parameter(torch.randn(4, 6, WIDTH) / 3), nn.Parameter(torch.randn(4, WIDTH, 6) / 3)
        self.gate, self.head = nn.Linear(6, 4), nn.Linear(6, CLASSES)
        self.scalars, self.scales = nn.Parameter(torch.zeros(2)), nn.ParameterDict({"gamma": torch.ones(1)})

    def forward(self, x):
        hidden = F.gelu(torch.einsum("nd,edh->neh", x, self.w1))
        mixed = torch.einsum("neh,ehd,ne->nd", hidden, self.w2, self.gate(x).softmax(-1))
        weights = self.scalars.softmax(0)
        return self.head(self.scales["gamma"] * (weights[0] * x + weights[1] * mixed))


class Grid(nn.Module):
    """A layer on coordinates that all samples share, as in Swin V2, and products with an embedding's weight."""

    def __init__(self):
        super().__init__()
        self.places = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, WIDTH))
        self.bag = nn.EmbeddingBag(WORDS, WIDTH)
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.register_buffer("grid", torch.rand(TOKENS, 2, generator=torch.Generator().manual_seed(0)))

    def forward(self, tokens):
        x = self.embed(tokens) * self.places(self.grid) + self.bag(tokens)[:, None]
        return self.head(torch.tanh(x.mean(1) @ self.embed.weight.t() @ self.embed.weight))


def computed(parametrization, **options):
    """A layer whose weight is computed from other parameters."""
    layer = parametrization(nn.Linear(6, WIDTH), **options)
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(WIDTH, CLASSES))


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.lstm = nn.Embedding(WORDS, 4), nn.LSTM(4, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens):
        lengths = (tokens > 0).sum(1).clamp(min=1).cpu()
        packed = nn.utils.rnn.pack_padded_sequence(self.words(tokens), lengths, True, enforce_sorted=False)
        return self.head(self.lstm(packed)[1][0][-1])


class DropPath(nn.Module):
    """timm: skip the block for a random half of the samples."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 6), nn.Linear(6, CLASSES)

    def forward(self, x):
        if self.training:
            x = x + self.body(x) * x.new_empty(len(x), 1).bernoulli_(0.5).div_(0.5)
        return self.head(x)


WORDS_OF_SAMPLES, IMAGES, ROWS, GRAPHS = "words", "images", "rows", "graphs"
STACKED = {
    "ViT": (ViT, IMAGES),
    "DropPath": (DropPath, ROWS),
    "resized positions": (ResizedPositions, IMAGES),
    "nanoGPT": (NanoGPT, WORDS_OF_SAMPLES),
    "the embedding's weight as the output layer": (lambda: NanoGPT(direct=True), WORDS_OF_SAMPLES),
    "Llama": (Llama, WORDS_OF_SAMPLES),
    "relative positions": (RelativeBias, IMAGES),
    "relative positions as a mask": (lambda: RelativeBias(as_mask=True), IMAGES),
    "time on the first axis": (TimeFirst, WORDS_OF_SAMPLES),
    "DETR's queries": (Queries, IMAGES),
    "Perceiver": (Perceiver, WORDS_OF_SAMPLES),
    "FT-Transformer": (TabularTransformer, ROWS),
    "CLIP": (Clip, ROWS),
    "graph": (Graph, GRAPHS),
    "ConvNeXt": (ConvNeXt, IMAGES),
    "learned first state": (FirstState, WORDS_OF_SAMPLES),
    "experts": (Experts, ROWS),
    "coordinates": (Grid, WORDS_OF_SAMPLES),
    "weight norm": (lambda: computed(parametrizations.weight_norm), ROWS),
    "orthogonal weights": (lambda: computed(parametrizations.orthogonal, orthogonal_map="cayley"), ROWS),
}
IN_THE_LOOP = {"packed": (Packed, WORDS_OF_SAMPLES)}


def data(kind, samples=48, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    y = torch.arange(samples) % CLASSES
    if kind == WORDS_OF_SAMPLES:
        return torch.randint(0, WORDS, (samples, TOKENS), generator=generator), y
    shape = {IMAGES: (3, 8, 8), ROWS: (6,), GRAPHS: (5, 3)}[kind]
    x = torch.randn(samples, *shape, generator=generator, dtype=dtype)
    if kind == GRAPHS:
        edges = (torch.rand(samples, 5, 5, generator=generator) > 0.5).to(dtype) + torch.eye(5, dtype=dtype)
        return (x, edges), y
    return x, y
