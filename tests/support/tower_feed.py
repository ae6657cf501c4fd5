"""What a tower makes of images and sounds in transformers, to be held against llama.cpp's mtmd.

Images have sizes that no preprocessor changes, so that both sides get the same pixels.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Array = Any


def image(height: int, width: int, seed: int) -> Array:
    """A picture with something in it everywhere, [height, width, 3] of bytes."""
    import numpy as np

    rng = np.random.default_rng(seed)
    rows, columns = np.mgrid[0:height, 0:width] / 8.0
    waves = [np.sin(rows * rng.uniform(0.5, 2) + columns * rng.uniform(0.5, 2) + rng.uniform(0, 6)) for _ in range(3)]
    noise = rng.normal(0, 0.2, (height, width, 3))
    made: Array = ((np.stack(waves, -1) + noise).clip(-1, 1) * 127.5 + 127.5).round().astype(np.uint8)
    return made


def sound(n_samples: int, seed: int) -> Array:
    """A chord that swells, with noise, [n_samples] of float32 at 16 kHz."""
    import numpy as np

    rng = np.random.default_rng(seed)
    time = np.arange(n_samples) / 16000
    tones = sum(np.sin(2 * np.pi * rng.uniform(150, 3000) * time + rng.uniform(0, 6)) for _ in range(4))
    return (tones * (0.1 + 0.05 * np.sin(3 * time)) + rng.normal(0, 0.01, n_samples)).astype(np.float32)


def media(size: Sequence[int], seed: int) -> Array:
    """An image of (height, width), or a sound of (samples,)."""
    return image(size[0], size[1], seed) if len(size) == 2 else sound(size[0], seed)


def _scaled(folder: Path, pixels: Array) -> Any:
    """The image as a batch, [1, 3, height, width], scaled as its preprocessor_config.json asks."""
    import torch

    told = json.loads((folder / "preprocessor_config.json").read_text())
    mean, std = (torch.tensor(told[f"image_{name}"]).view(1, 3, 1, 1) for name in ("mean", "std"))
    return (torch.tensor(pixels).permute(2, 0, 1)[None].float() / 255 - mean) / std


def _pixels(model: Any, folder: Path, pixels: Array) -> Any:
    seeing = model if hasattr(model, "get_image_features") else model.model
    return seeing.get_image_features(pixel_values=_scaled(folder, pixels))


def _columns(model: Any, folder: Path, pixels: Array) -> Any:
    """Llama 4's square image, with the positions column by column as llama.cpp has them."""
    states = model.get_image_features(pixel_values=_scaled(folder, pixels)).last_hidden_state.flatten(0, 1)
    side = int(len(states) ** 0.5)
    return model.multi_modal_projector(states.view(side, side, -1).transpose(0, 1).reshape(len(states), -1))


def _sized(model: Any, folder: Path, pixels: Array) -> Any:
    """Pixtral's image; behind each row but the last stands the embedding of the last token, [IMG_BREAK]."""
    import torch

    told, inner = model.config.vision_config, model.model
    scaled, sizes = _scaled(folder, pixels), [pixels.shape[:2]]
    if model.config.model_type == "llava":  # which does not find the states of its own tower
        states = inner.vision_tower(scaled, image_sizes=torch.tensor(sizes)).last_hidden_state
        found = _flat(inner.multi_modal_projector(states))
    else:
        found = _flat(model.get_image_features(pixel_values=scaled, image_sizes=sizes))
    columns = pixels.shape[1] // told.patch_size // getattr(model.config, "spatial_merge_size", 1)
    rows = torch.tensor(found).view(-1, columns, found.shape[-1])
    last = inner.get_input_embeddings().weight[-1].expand(len(rows), 1, -1)
    return torch.cat([rows, last], 1).reshape(-1, found.shape[-1])[:-1]


def _merged(model: Any, folder: Path, pixels: Array) -> Any:
    """Patches in Qwen's order: squares of `spatial_merge_size` patches one after the other, each image twice."""
    import torch

    told = model.config.vision_config
    size, side = told.patch_size, told.spatial_merge_size
    frames = getattr(told, "temporal_patch_size", 1)
    scaled = _scaled(folder, pixels).repeat(frames, 1, 1, 1)
    rows, columns = scaled.shape[2] // size, scaled.shape[3] // size
    view = scaled.view(1, frames, 3, rows // side, side, size, columns // side, side, size)
    patches = view.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(rows * columns, -1)
    return model.get_image_features(pixel_values=patches, image_grid_thw=torch.tensor([[1, rows, columns]]))


def _rows_of_patches(model: Any, folder: Path, pixels: Array) -> Any:
    """Patches row by row, [patches, 3, size, size]."""
    import torch

    size, scaled = model.config.vision_config.patch_size, _scaled(folder, pixels)
    rows, columns = scaled.shape[2] // size, scaled.shape[3] // size
    patches = scaled.view(3, rows, size, columns, size).permute(1, 3, 0, 2, 4).reshape(rows * columns, 3, size, size)
    return model.get_image_features(pixel_values=patches, image_grid_thw=torch.tensor([[1, rows, columns]]))


def _rows_of_flat_patches(model: Any, folder: Path, pixels: Array) -> Any:
    """Patches row by row, [patches, 3 * size * size]."""
    import torch

    size, scaled = model.config.vision_config.patch_size, _scaled(folder, pixels)
    rows, columns = scaled.shape[2] // size, scaled.shape[3] // size
    patches = scaled.view(3, rows, size, columns, size).permute(1, 3, 0, 2, 4).reshape(rows * columns, -1)
    return model.get_image_features(pixel_values=patches, image_grid_thw=torch.tensor([[1, rows, columns]]))


def _placed_patches(model: Any, folder: Path, pixels: Array) -> Any:
    """Patches [1, patches, size * size * 3] with the column and row of each."""
    import torch

    told, scaled = model.config.vision_config, _scaled(folder, pixels)
    size = getattr(told, "model_patch_size", told.patch_size)
    rows, columns = scaled.shape[2] // size, scaled.shape[3] // size
    patches = scaled.view(3, rows, size, columns, size).permute(1, 3, 2, 4, 0).reshape(1, rows * columns, -1)
    places = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).flip(-1)[None]
    return model.get_image_features(pixel_values=patches, image_position_ids=places)


def _mel(model: Any, folder: Path, samples: Array) -> Any:
    """Whisper's spectrogram of 30 seconds."""
    from transformers import WhisperFeatureExtractor

    extractor = WhisperFeatureExtractor(feature_size=model.config.audio_config.num_mel_bins)
    found = extractor(samples, sampling_rate=16000, return_tensors="pt", return_attention_mask=True)
    features = found["input_features"]
    if hasattr(model, "get_audio_features"):
        return model.get_audio_features(features)
    inner = getattr(model, "model", model)
    return inner.multi_modal_projector(inner.audio_tower(features).last_hidden_state)


def _frames(model: Any, folder: Path, samples: Array) -> Any:
    """Gemma 4's spectrogram, of the sound alone."""
    from transformers import Gemma4AudioFeatureExtractor

    found = Gemma4AudioFeatureExtractor()([samples], pad_to_multiple_of=None, return_tensors="pt")
    return model.model.get_audio_features(found["input_features"], found["input_features_mask"])


def _pairs_of_frames(model: Any, folder: Path, samples: Array) -> Any:
    """Granite's spectrogram, two frames a position; as torchaudio computes it."""
    import torch
    from transformers.audio_utils import mel_filter_bank

    window = torch.hann_window(400)
    found = torch.stft(torch.tensor(samples), 512, 160, 400, window, center=True, return_complex=True)
    filters = torch.tensor(mel_filter_bank(257, 80, 0.0, 8000.0, 16000, norm=None, mel_scale="htk")).float()
    mel = (found.abs() ** 2).T @ filters
    logs = mel.clip(min=1e-10).log10()
    scaled = torch.maximum(logs, logs.max() - 8) / 4 + 1
    return model.get_audio_features(scaled[: len(scaled) // 2 * 2].reshape(1, -1, 160))


def _tiles(model: Any, folder: Path, pixels: Array) -> Any:
    """An image as large as a tile: itself as the overview, and as the only tile."""
    import torch

    scaled = _scaled(folder, pixels)
    sizes = torch.tensor([pixels.shape[:2]])
    found = model.get_image_features(pixel_values=torch.stack([scaled, scaled], 1), image_sizes=sizes)
    # mtmd has the features of all projectors side by side, in the order of the layers that get them.
    fed = sorted(found.deepstack_features, key=lambda one: one[0] % model.config.text_config.num_hidden_layers)
    return torch.cat([torch.cat(list(features)) for _, features in fed], -1)


def _overview_and_tile(model: Any, folder: Path, pixels: Array) -> Any:
    """An image as large as a tile of Idefics 3, which mtmd has twice: as the only tile, and as the overview."""
    import torch

    return model.model.get_image_features(pixel_values=torch.stack([_scaled(folder, pixels)] * 2, 1))


FEEDS: dict[str, Callable[[Any, Path, Array], Any]] = {
    "pixels": _pixels,
    "tiles": _tiles,
    "overview_and_tile": _overview_and_tile,
    "columns": _columns,
    "sized": _sized,
    "merged": _merged,
    "rows_of_patches": _rows_of_patches,
    "rows_of_flat_patches": _rows_of_flat_patches,
    "placed_patches": _placed_patches,
    "mel": _mel,
    "frames": _frames,
    "pairs_of_frames": _pairs_of_frames,
}
"""How a case's model is given an image, or a sound."""


def transformers_embeddings(
    folder: Path, model_class: str, feed: str, inputs: list[Array], *, part: str = ""
) -> list[Array]:
    """What the saved model, or the `part` of it that `model_class` is, gives its language model for each input.

    [tokens, width] in float32.
    """
    import torch
    from arch_models import quiet_transformers

    transformers = quiet_transformers()
    if part:
        model = _part(getattr(transformers, model_class), folder, part).eval()
    else:
        model = getattr(transformers, model_class).from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return [_flat(FEEDS[feed](model, folder, given)) for given in inputs]


def _part(model_class: Any, folder: Path, part: str) -> Any:
    """The part of a saved model that has a config, and names, of its own; all but its language model is loaded."""
    from safetensors.torch import load_file

    config = model_class.config_class(**json.loads((folder / "config.json").read_text())[f"{part}_config"])
    model = model_class(config).float()
    tensors = load_file(folder / "model.safetensors").items()
    own = {f"model.{name.removeprefix(f'{part}.')}": tensor for name, tensor in tensors}
    found = model.load_state_dict(own, strict=False)
    missing = [name for name in found.missing_keys if not name.startswith(("lm_head.", "model.language_model."))]
    if missing:
        raise ValueError(f"the checkpoint lacks {missing[:3]}")
    return model


def _flat(found: Any) -> Array:
    import torch

    beside = getattr(found, "deepstack_features", None) or []  # mtmd has them behind the others, row by row
    found = getattr(found, "pooler_output", found)
    if isinstance(found, tuple | list):
        found = torch.cat([part.reshape(-1, part.shape[-1]) for part in found])
    if isinstance(beside, tuple | list) and beside and isinstance(beside[0], tuple | list):
        beside = [torch.cat(list(part)) for part in beside]
    parts = [found, *beside]
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts], -1).float().numpy()
