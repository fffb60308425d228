"""What the plugins exllamav2 and exllamav3 have in common; no plugin itself.

vocabulary  text to tokens and back, and the libraries' view of it
models      what is in a model's directory
gpus        whether there are any, and what they have free
progress    of a model that is being loaded
stepper     a library's generator, as the loop drives it
engine      what is made of a stepper
"""
