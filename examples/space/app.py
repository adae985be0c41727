"""The page of `hf-deqnar demo` as a Hugging Face Space."""

import os

from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

import hf_deqnar
from hf_deqnar.demo.page import create_page, launch_options
from hf_deqnar.documents.translator import Translator

MODEL = os.environ.get("MODEL", hf_deqnar.PRETRAINED)

model = AutoModelForSeq2SeqLM.from_pretrained(MODEL).eval()
tokenizer = AutoTokenizer.from_pretrained(MODEL)
page = create_page(Translator(model, tokenizer))

if __name__ == "__main__":
    page.launch(**launch_options())
