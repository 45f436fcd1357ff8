"""The stated figures behind the modelled rows of the shipped L20 table: the device, and four models.

Weights are the parameter counts of TridentServe, arXiv 2510.02838, Table 2, in bfloat16, but for CogVideoX, whose text
encoder Table 2 gives as 0.35 B: its model folder holds a T5-XXL encoder of 4.8 B, as SD3 and Flux do. Widths, channels
and compression factors are those of the published model configurations.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from profiler.tables.links import LinkSpeeds

GPU = "NVIDIA L20"
BF16_BYTES = 2

# NVIDIA's data sheet of the L20: dense bfloat16 tensor cores, and GDDR6.
PEAK_FLOPS_PER_S = 119.5e12
PEAK_BYTES_PER_S = 864e9
# Assumed: what large matrix products reach of the first, and the many small passes of a convolutional decoder of the
# second.
MATMUL_EFFICIENCY = 0.5
DECODER_BANDWIDTH_EFFICIENCY = 0.25
# Assumed: attention over all latents in an image decoder has one head as wide as 512, beyond fused kernels.
DECODER_ATTENTION_FLOPS_PER_S = 20e12
DECODER_ATTENTION_WIDTH = 512

# Assumed: launches, tokenizing; and for pixels also their copy to the host.
ENCODE_OVERHEAD_S = 0.01
DECODE_OVERHEAD_S = 0.08
# Section 2.1: prompts have 30 to 500 tokens; the pipelines pad them.
PROMPT_TOKENS = 512
# After the paper's Figure 17: a further prompt in a batch of ENCODE costs next to nothing.
ENCODE_BATCHES = (2, 4, 8, 16, 32)
ENCODE_COST_OF_A_FURTHER_PROMPT = 0.005
# After Figure 3: DECODE gains little from width. T(k) = T(1) (0.85 + 0.15 / k).
DECODE_DEGREES = (1, 2, 4, 8)
DECODE_SERIAL_SHARE = 0.85
# Batches of DIFFUSE are listed where they save at least this share of the time of one after the other.
DIFFUSE_BATCHES = (2, 4, 8)
DIFFUSE_BATCH_LEAST_SAVING = 0.05

# Assumed: memory of libraries and kernels that a running stage holds in addition to its tensors.
WORKSPACE_BYTES = 300_000_000
# Assumed: live bfloat16 values per token of DIFFUSE and ENCODE, in hidden widths (residual, q, k, v, the 4x wide MLP
# twice, attention output, all-to-all buffers).
LIVE_WIDTHS_PER_TOKEN = 16

# PCIe 4.0 x16 is 31.5 GB/s and 100 Gb/s Ethernet 12.5 GB/s; assumed that 80 % of both arrive. One NVMe disk per node.
LINKS = LinkSpeeds(
    intra_node_bytes_per_s=25e9,
    inter_node_bytes_per_s=10e9,
    host_bytes_per_s=25e9,
    disk_bytes_per_s=2.5e9,
    transfer_latency_s=0.0005,
    load_latency_s=0.05,
)


@dataclass(frozen=True, slots=True)
class ModelFigures:
    """The figures from which the rows of one model are computed."""

    name: str
    """The name of the model in the table."""
    encoder_parameters: float
    """The number of parameters of ENCODE."""
    encoder_width: int
    """The hidden width of ENCODE."""
    transformer_parameters: float
    """The number of parameters of DIFFUSE."""
    width: int
    """The hidden width of DIFFUSE."""
    guidance_passes: int
    """2 where classifier-free guidance doubles the sequence, else 1."""
    decoder_parameters: float
    """The number of parameters of DECODE."""
    decode_traffic_bytes: float
    """Bytes per pixel and frame that the decoder moves through memory. The figure is calibrated: with it DECODE takes
    the 15 to 30 % of a request at degree 1 that the paper (section 2.1) gives, at the steps of its Table 5.
    docs/planning.md names the size that is out of range."""
    decode_live_bytes: float
    """Bytes per pixel and frame that the decoder keeps in memory."""
    frames_per_token: int = 1
    """Pixel frames that one latent frame decodes to."""
    temporal_overlap: float = 1.0
    """The factor on the traffic when there are several frames, as tiles in time overlap."""
    attends_over_latents: bool = False
    """True where the decoder has attention over all latents."""


# Its decoder (AutoencoderKL, the same network as Flux has) keeps about eight full-size maps of 128 channels.
_SD3 = ModelFigures(
    "sd3-medium",
    encoder_parameters=4.8e9,
    encoder_width=4096,
    transformer_parameters=2e9,
    width=1536,
    guidance_passes=2,
    decoder_parameters=0.1e9,
    decode_traffic_bytes=275e3,
    decode_live_bytes=2000.0,
    attends_over_latents=True,
)

MODELS = (
    _SD3,
    replace(_SD3, name="flux.1-dev", transformer_parameters=12e9, width=3072, guidance_passes=1),
    # Decodes two latent frames at a time, so that few frames are live at once.
    ModelFigures(
        "cogvideox1.5-5b",
        encoder_parameters=4.8e9,
        encoder_width=4096,
        transformer_parameters=4.2e9,
        width=3072,
        guidance_passes=2,
        decoder_parameters=0.45e9,
        decode_traffic_bytes=91e3,
        decode_live_bytes=150.0,
        frames_per_token=4,
    ),
    # Decodes in tiles (256 pixels, stride 192; 16 frames, stride 12): mostly the output and its blending is live.
    ModelFigures(
        "hunyuanvideo",
        encoder_parameters=8e9,
        encoder_width=4096,
        transformer_parameters=13e9,
        width=3072,
        guidance_passes=1,
        decoder_parameters=0.5e9,
        decode_traffic_bytes=110e3,
        decode_live_bytes=50.0,
        frames_per_token=4,
        temporal_overlap=4 / 3,
    ),
)
