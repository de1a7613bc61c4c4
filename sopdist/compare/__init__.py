"""`sopdist compare`: several methods, trained on the same data with the same seeds, in one table.

    entries.py      the methods, as the user wrote them
    plan.py         from the request to a checked list of runs
    label_sets.py   the label sets to train on, created if they do not exist
    record.py       compare.json: what a folder compares
    running.py      one run after the other, each as a training command of its own
    validation.py   the noisy validation labels that may choose a method
    results.py      from the files of the runs to the rows of the table
    table.py figure.py      the table and the curves as text and files

It knows runs only by their config and their files, and does not know what a method does.
"""
