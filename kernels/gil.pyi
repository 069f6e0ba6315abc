is_held: object
