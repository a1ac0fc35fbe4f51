"""SFT on images: a vision-language model learns to name what pictures show. Placeholders of images are never trained."""

from PIL import Image, ImageDraw

from posttrain import SFTConfig, SFTTrainer

MODEL = "llava-hf/llava-interleave-qwen-0.5b-hf"
COLOURS, SHAPES = ("red", "green", "blue", "orange"), {"square": "rectangle", "circle": "ellipse"}


def picture(colour, shape):
    made = Image.new("RGB", (64, 48), "white")
    getattr(ImageDraw.Draw(made), SHAPES[shape])((16, 8, 48, 40), fill=colour)
    return made


def row(colour, shape):
    """The image stands in its column, its place in the conversation is the part without a payload."""
    asked = [{"type": "image"}, {"type": "text", "text": "What is it?"}]
    said = [{"role": "user", "content": asked}, {"role": "assistant", "content": f"A {colour} {shape}."}]
    return {"images": [picture(colour, shape)], "messages": said}


trainer = SFTTrainer(
    MODEL,
    args=SFTConfig(
        output_dir="runs/sft-images",
        assistant_only_loss=True,
        freeze_vision_tower=True,  # what it knows of pictures is kept
        image_max_pixels=1024 * 1024,  # larger ones are shrunk before anything else
        max_steps=8,
        per_device_train_batch_size=4,
        learning_rate=1e-4,
        logging_steps=1,
    ),
    train_dataset=[row(colour, shape) for colour in COLOURS for shape in SHAPES],
)
trainer.train()
trainer.save_model()  # with its processor

processor = trainer.processing_class
asked = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}]
text = processor.apply_chat_template(asked, add_generation_prompt=True)
inputs = processor(text=[text], images=[[picture("blue", "circle")]], return_tensors="pt").to(trainer.model.device)
answer = trainer.model.generate(**inputs, max_new_tokens=16, do_sample=False)
print(processor.decode(answer[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
