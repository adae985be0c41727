# Publish a model with its tokenizer, code and card; afterwards it loads by its name, also without this package.
hf-deqnar push --model runs/student --repo_id user/my-model --source en --target de --private
